"""Routers compared on recorded work: `forge bench routing`, with tables and pictures.

    .venv/bin/python reports/routing.py [--data ../shared/data] [--pages-only]

Writes reports/routing/: results.json (what the bench prints), results.md, gain.png, ttft.png. Ten minutes on two cores
that have nothing else to do, and a build of the core (`make fast`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from pictures import palette, save

HERE = Path(__file__).parent / "routing"
DATA = Path(__file__).parents[2] / "shared" / "data"
WORK = {"claude_code": "Claude Code sessions, closed loop", "mooncake": "Mooncake conversations, open loop"}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, default=DATA)
    arguments.add_argument("--pages-only", action="store_true", help="from results.json")
    given = arguments.parse_args()
    from forge.runs import read_json, write_json, write_text

    HERE.mkdir(exist_ok=True)
    if not given.pages_only:
        write_json(HERE / "results.json", measure(given.data))
    results = read_json(HERE / "results.json")
    assert results is not None, "no results.json: run without --pages-only first"
    write_text(HERE / "results.md", "\n".join(page(results)) + "\n")
    plot_gains(results["rows"])
    plot_ttft(results["rows"])


def measure(data: Path) -> dict[str, Any]:
    from rich.progress import Progress

    from forge.doctor import machine
    from sim.routing_bench import FULL, run

    with Progress() as progress:
        task = progress.add_task("runs", total=None)
        result = run(data, FULL, lambda done, of: progress.update(task, completed=done, total=of))
    return {"bench": "routing", "machine": machine(), **result}


# --- results.md ------


def page(results: dict[str, Any]) -> list[str]:
    rows = results["rows"]
    return [
        "# Routers on recorded work",
        "",
        "Made by `python reports/routing.py`, which runs what `forge bench routing --data DIR --json` prints.",
        "",
        results["protocol"] + ".",
        "",
        *verdict(results),
        *(line for work, title in WORK.items() for line in cells(title, [r for r in rows if r["workload"] == work])),
        "![gain](gain.png)",
        "",
        "![TTFT](ttft.png)",
        "",
        "## All routers, mean and p99 TTFT (s), requests/s, prompt tokens hit",
        "",
        *(line for row in rows for line in everyone(row)),
        "## Paces",
        "",
        *(f"- {work}: {told}" for work, told in results["paces"].items()),
    ]


def verdict(results: dict[str, Any]) -> list[str]:
    figures, rows = results["figures"], results["rows"]
    by_routers: dict[int, list[float]] = {}
    for row in rows:
        by_routers.setdefault(row["routers"], []).append(row["gain"])
    enough = sum(row["gain"] >= 0.15 for row in rows)
    return [
        f"`seconds` against the best baseline of each cell, mean TTFT: no baseline is significantly better in "
        f"{figures['cells_best']} of {figures['cells']} cells; at least 15% better in {enough}; median gain "
        f"{figures['mean_ttft_gain_median']:+.1%}, worst {figures['worst_cell_gain']:+.1%}.",
        "",
        *(
            f"- {count} in parallel: median {median(gains):+.1%}, from {min(gains):+.1%} to {max(gains):+.1%}"
            for count, gains in by_routers.items()
        ),
        "",
        "One router alone knows all that is in flight, and `kv_centric` then already takes the least of queue,",
        "transfer and prefill: there is next to nothing left to gain. Several routers know their own part only: there",
        "the baselines that count nothing else, or believe what an old report says, lose. What was tried is in",
        "`reports/LOG.md`.",
        "",
    ]


def cells(title: str, rows: list[dict[str, Any]]) -> list[str]:
    """`rows`: of one workload; may be none."""
    if not rows:
        return []
    lines = [
        f"## {title}",
        "",
        "| load | routers | signal s | ours s | best baseline | its s | gain | slower by s (95%) | beaten by |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        ours, best = row["routers_compared"]["seconds"], row["routers_compared"][row["best_baseline"]]
        slower = best["slower_s"]
        lines.append(
            f"| {row['load']:g} | {row['routers']} | {row['signal_s']:g} | {ours['ttft_s']:.3f} "
            f"| `{row['best_baseline']}` | {best['ttft_s']:.3f} | {row['gain']:+.1%} "
            f"| {slower['mean']:+.3f} [{slower['low']:+.3f}, {slower['high']:+.3f}] "
            f"| {', '.join(row['beaten_by']) or '-'} |"
        )
    return [*lines, ""]


def everyone(row: dict[str, Any]) -> list[str]:
    title = f"{row['workload']}, load {row['load']:g}, {row['routers']} in parallel, signal {row['signal_s']:g} s"
    table = [
        f"| `{name}` | {one['ttft_s']:.3f} | {one['p99_s']:.2f} | {one['requests_per_s']:.3f} | {one['hit']:.1%} |"
        for name, one in sorted(row["routers_compared"].items(), key=lambda item: item[1]["ttft_s"])
    ]
    return [f"{title}:", "", "| router | mean | p99 | requests/s | hit |", "|---" * 5 + "|", *table, ""]


# --- plots ------


def plot_gains(rows: list[dict[str, Any]]) -> None:
    plt, blue, orange, _ = palette()
    figure, ax = plt.subplots(figsize=(7.5, 0.24 * len(rows) + 1), layout="constrained")
    for y, row in enumerate(rows):
        best = row["routers_compared"][row["best_baseline"]]
        bounds = [100 * best["slower_s"][key] / best["ttft_s"] for key in ("low", "high")]
        ax.barh(y, 100 * row["gain"], color=blue if row["routers"] == 1 else orange)
        ax.plot(bounds, [y, y], color="0.3", linewidth=1)
    ax.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=7)
    ax.invert_yaxis()
    ax.axvline(15, color="0.5", linestyle=":")
    ax.set(xlabel="mean TTFT below the best baseline's (%), 95%; dotted: 15%")
    save(figure, HERE / "gain.png")


def plot_ttft(rows: list[dict[str, Any]]) -> None:
    """At the highest load and the oldest signals."""
    plt, blue, _, green = palette()
    worst = max(row["load"] for row in rows), max(row["signal_s"] for row in rows)
    shown = [row for row in rows if (row["load"], row["signal_s"]) == worst]
    figure, axes = plt.subplots(1, len(shown), figsize=(3 * len(shown), 3.4), layout="constrained", squeeze=False)
    for ax, row in zip(axes[0], shown, strict=True):
        ranked = sorted(row["routers_compared"].items(), key=lambda item: item[1]["ttft_s"])
        ax.barh(
            [name for name, _ in ranked],
            [one["ttft_s"] for _, one in ranked],
            color=[green if name == "seconds" else blue for name, _ in ranked],
        )
        ax.invert_yaxis()
        ax.tick_params(labelsize=7)
        ax.set(xscale="log", xlabel="mean TTFT (s)")
        ax.set_title(f"{row['workload']}, {row['routers']} in parallel", fontsize=8)
    save(figure, HERE / "ttft.png")


def label(row: dict[str, Any]) -> str:
    return f"{row['workload']} {row['load']:g}, {row['routers']} x, {row['signal_s']:g} s"


if __name__ == "__main__":
    main()
