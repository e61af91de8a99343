"""How much does prefix-tree merging save, and when? Speed-up against turns, prefix, group size and compaction.

    .venv/bin/python reports/tree_merging.py [--data DIR] [--factor 10]

Runs `forge bench tree`, then varies one number at a time around T = 24 turns, G = 4, p = 1,000 and d = 50 tokens: a
real gradient merged and flat at every point, with the curve of the FLOP bound. Writes reports/tree_merging/:
results.json, results.md and speedup.png. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent / "tree_merging"
BASE = {"turns": 24, "group": 4, "prompt": 1000, "step": 50, "compact_every": None}
VARIED: dict[str, tuple[str, list[Any]]] = {
    "turns": ("turns T", [1, 2, 4, 8, 16, 32, 60]),
    "prompt": ("common prompt p (tokens)", [0, 100, 500, 1000, 2000, 4000]),
    "group": ("group size G", [1, 2, 4, 8, 16]),
    "compact_every": ("context compacted every so many turns (24: never)", [2, 4, 8, 12, 24]),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path)
    arguments.add_argument("--factor", type=int, default=10)
    given = arguments.parse_args()

    from rich.console import Console

    from forge.bench import tree
    from forge.doctor import machine
    from forge.runs import write_json

    console = Console()
    result = tree.run(data=given.data, factor=given.factor)
    with TemporaryDirectory() as folder:
        bench = tree.Bench(Path(folder), result["device"])
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, (_, values) in VARIED.items():
        curves[name] = []
        for value in values:
            row = bench.row(tree.workloads.agents(**{**BASE, name: value}, vocabulary=tree.SHAPE["vocab_size"]))
            curves[name].append({"value": value, **tree.asdict(row)})
            console.print(
                f"{row.workload}: {row.speedup_vs_per_request:.1f} of a bound of {row.flop_bound:.1f}", highlight=False
            )
    HERE.mkdir(exist_ok=True)
    write_json(HERE / "results.json", {"machine": machine(), **result, "curves": curves})
    write(result, curves, machine())


def write(result: dict[str, Any], curves: dict[str, list[dict[str, Any]]], machine: dict[str, Any]) -> None:
    from forge.runs import write_text

    plot(curves)
    lines = [
        "# Prefix-tree merging: what it saves",
        "",
        f"{result['model']}, {result['device']}; {machine['processor']}, one thread; torch {machine_torch()}.",
        "Both sides are the trainer's gradient: merged, against one unpadded sample a request through the causal",
        "flash kernel. Timed: the share of the flat side's samples that was run, the rest scaled by FLOPs. MiB: the",
        "peak above what was in use before. Workload of the figures:",
        f"{result['workload']}.",
        "",
        "| workload | F/U | attention ratio | FLOP bound | measured | of the bound | over trajectories | timed "
        "| MiB merged, per request, per trajectory | model |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row_of(row) for row in result["rows"]),
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| `{name}` | {value:.3g} |" for name, value in result["figures"].items() if value is not None),
        "",
        "![speed-up](speedup.png)",
        "",
        "| varied | value | F/U | FLOP bound | measured | of the bound |",
        "|---|---|---|---|---|---|",
        *(
            f"| {VARIED[name][0]} | {p['value']} | {p['flat_over_unique']:.1f} | {p['flop_bound']:.1f} "
            f"| {p['speedup_vs_per_request']:.1f} | {p['efficiency']:.2f} |"
            for name, points in curves.items()
            for p in points
        ),
        "",
        "Made by `python reports/tree_merging.py`.",
    ]
    write_text(HERE / "results.md", "\n".join(lines) + "\n")


def machine_torch() -> str:
    import torch

    return str(torch.__version__)


MEMORY = ("merged_mib", "per_request_mib", "trajectory_mib")


def row_of(row: dict[str, Any]) -> str:
    over = "-" if row["speedup_vs_trajectory"] is None else f"{row['speedup_vs_trajectory']:.2f}"
    mib = ", ".join("-" if row[k] is None else f"{row[k]:,.0f}" for k in MEMORY)
    return (
        f"| {row['workload']} | {row['flat_over_unique']:.1f} | {row['attention_ratio']:.1f} | {row['flop_bound']:.1f} "
        f"| {row['speedup_vs_per_request']:.1f} | {row['efficiency']:.2f} | {over} "
        f"| {row['sampled']:.3g} | {mib} | {row['model']} |"
    )


def plot(curves: dict[str, list[dict[str, Any]]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from forge.report.drawing import BLUE, ORANGE, STYLE

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(curves), figsize=(15, 3.8), layout="constrained", sharey=True)
        for ax, (name, points) in zip(axes, curves.items(), strict=True):
            at = [p["value"] for p in points]
            ax.plot(at, [p["flop_bound"] for p in points], color=ORANGE, label="FLOP bound")
            ax.plot(at, [p["speedup_vs_per_request"] for p in points], "o", color=BLUE, label="measured")
            ax.plot(at, [p["flat_over_unique"] for p in points], ":", color="0.5", label="tokens, F/U")
            ax.set(xlabel=VARIED[name][0])
        axes[0].set(ylabel="speed-up over one sample a request")
        axes[0].legend()
        figure.savefig(HERE / "speedup.png", dpi=110)
        plt.close(figure)


if __name__ == "__main__":
    main()
