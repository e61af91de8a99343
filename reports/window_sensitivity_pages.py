"""The words and pictures of `window_sensitivity.py`, all computed from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from forge.metrics.intervals import Interval, mean_interval

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, Any]
#: what a scheduler is judged by, and whether more is better
OBJECTIVES = {"items_per_min": 1, "nonstationarity": -1, "lag_mean": -1}
#: a gain below this share is none: non-stationarity is a ratio to shuffles, which differ by 1% with the order alone
#: (N = P: every window trains the very same batches)
LEAST = 0.02
BUDGETS = (18, 31, 39, 62, 126)


def mean(row: Row, key: str) -> float:
    return float(row["figures"][key]["mean"])


def difference(one: Row, other: Row, key: str) -> Interval:
    """`one` minus `other`, seed by seed on the same work."""
    return mean_interval([a[key] - b[key] for a, b in zip(one["runs"], other["runs"], strict=True)])


def dominates(one: Row, other: Row) -> bool:
    """Better in one objective beyond the 95% interval and by LEAST, and not worse in any beyond the interval."""
    gains = [
        (d.low, d.high, d.mean) if sign > 0 else (-d.high, -d.low, -d.mean)
        for key, sign in OBJECTIVES.items()
        for d in (difference(one, other, key),)
    ]
    levels = [sum(run[key] for run in other["runs"]) / len(other["runs"]) for key in OBJECTIVES]
    better = any(low > 0 and gain > LEAST * abs(level) for (low, _, gain), level in zip(gains, levels, strict=True))
    return better and all(high >= 0 for _, high, _ in gains)


def fixed(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if r["fraction"] is not None and not r["escape"][0]]


def at(rows: Sequence[Row], fraction: float | None, *, escape: bool = False) -> Row:
    """The one with this window; of two adaptive ones that with the larger budget."""
    return next(r for r in rows if r["fraction"] == fraction and bool(r["escape"][0]) is escape)


def groups(rows: Sequence[Row], *keys: str) -> list[tuple[tuple[Any, ...], list[Row]]]:
    names = list(dict.fromkeys(tuple(r[k] for k in keys) for r in rows))
    return [(name, [r for r in rows if tuple(r[k] for k in keys) == name]) for name in names]


def cell(row: Row, key: str, digits: int = 2) -> str:
    f = row["figures"][key]
    half = (f["high"] - f["low"]) / 2
    return f"{f['mean']:.{digits}f} ± {half:.{digits}f}"


def percent(interval: Interval, base: float) -> str:
    return f"{100 * interval.mean / base:+.1f}% [{100 * interval.low / base:+.1f}, {100 * interval.high / base:+.1f}]"


def write_markdown(result: dict[str, Any], path: Path) -> None:
    rows = result["rows"]
    parts = [_head(result), _answer(rows), _by_n(rows), _adaptive(rows), _budgets(rows), _escape(rows), _all(rows)]
    path.write_text("\n".join(parts), encoding="utf-8")


def _head(result: dict[str, Any]) -> str:
    return (
        "# The window's sensitivity\n\n"
        "Made by `python reports/window_sensitivity.py`. Simulated: items of about a minute (light: sigma 0.25; "
        "log-normal: 0.9; heavy tail: Pareto 1.3 capped at 50 minutes; fifty: one in sixty takes 50 minutes), one "
        "domain or two of which one is six times as long; C engine slots, batches of 8, a trainer that is busy for "
        f"0.8 of what the slots need for a batch. {result['items']} items a run, seeds {result['seeds']}, 95% "
        "intervals (Student's t) over them; differences are paired by seed. Throughput up to the last submission.\n"
    )


def _answer(rows: Sequence[Row]) -> str:
    """Where 0.3 is right and where it is wrong, counted over all cells."""
    cells = [
        (r["family"], r["n"] / r["concurrency"], mine)
        for (_, _), mine in groups(rows, "family", "n")
        for r in mine[:1]
        if {0.0, 0.3, 1.0} <= {row["fraction"] for row in mine}
    ]
    lines = [
        "## Is 0.3 right?\n",
        "Cells are families at one N. A gain counts where its interval does not hold 0; ranges are of means.\n",
        "| N | cells | 0.3 N faster than strict | by | N faster than 0.3 N | by | 0.3 N calmer than N | by |",
        "|-|-|-|-|-|-|-|-|",
    ]
    for over in sorted({over for _, over, _ in cells}):
        mine = [rows for _, o, rows in cells if o == over]
        trios = [[at(rows, f) for f in (0.0, 0.3, 1.0)] for rows in mine]
        lines.append(
            f"| {over:g} C | {len(mine)} | {_counted([(b, a) for a, b, _ in trios], 'items_per_min', 1)} | "
            f"{_counted([(c, b) for _, b, c in trios], 'items_per_min', 1)} | "
            f"{_counted([(b, c) for _, b, c in trios], 'nonstationarity', -1)} |"
        )
    return "\n".join(lines) + "\n"


def _counted(pairs: Sequence[tuple[Row, Row]], key: str, sign: int) -> str:
    """In how many pairs the first is better beyond noise, and the range of its gain in percent."""
    gains = [(difference(one, other, key), mean(other, key)) for one, other in pairs]
    better = sum((gain.low if sign > 0 else -gain.high) > 0 for gain, _ in gains)
    shares = [100 * sign * gain.mean / base for gain, base in gains]
    return f"{better} | {min(shares):+.0f}% to {max(shares):+.0f}%"


def _by_n(rows: Sequence[Row]) -> str:
    """0.3 against strict order, by N: what is gained where every slot's item also holds a place in the queue."""
    lines = ["## 0.3 N against strict order, and the widest window against 0.3 N, in items per minute\n"]
    lines += [
        "| family | N | 0.3 N over strict | N over 0.3 N | non-stationarity strict, 0.3, 1 |",
        "|-|-|-|-|-|",
    ]
    for (family, n), mine in groups(rows, "family", "n"):
        if not {0.0, 0.3, 1.0} <= {r["fraction"] for r in mine}:
            continue
        strict, usual, widest = (at(mine, f) for f in (0.0, 0.3, 1.0))
        first = percent(difference(usual, strict, "items_per_min"), mean(strict, "items_per_min"))
        second = percent(difference(widest, usual, "items_per_min"), mean(usual, "items_per_min"))
        unrest = ", ".join(f"{mean(r, 'nonstationarity'):.2f}" for r in (strict, usual, widest))
        lines.append(f"| {family} | {n} | {first} | {second} | {unrest} |")
    return "\n".join(lines) + "\n"


def _adaptive(rows: Sequence[Row]) -> str:
    """Against the front of fixed windows at the same N."""
    lines = ["## The adaptive window against every fixed one of the same N\n"]
    lines += [
        "| family | N | over 0.3 N | over the fastest fixed | non-stationarity, of fastest | lag max | dominated by |"
    ]
    lines.append("|-|-|-|-|-|-|-|")
    beaten = total = 0
    for (family, n), mine in groups(rows, "family", "n"):
        adaptive = at(mine, None)
        fastest = max(fixed(mine), key=lambda r: mean(r, "items_per_min"))
        by = [r["name"] for r in fixed(mine) if dominates(r, adaptive)]
        beaten, total = beaten + bool(by), total + 1
        over = [
            percent(difference(adaptive, r, "items_per_min"), mean(r, "items_per_min"))
            for r in (at(mine, 0.3), fastest)
        ]
        unrest = f"{mean(adaptive, 'nonstationarity'):.2f}, {mean(fastest, 'nonstationarity'):.2f}"
        lag = f"{mean(adaptive, 'lag_max'):.0f}, {mean(fastest, 'lag_max'):.0f}"
        lines.append(
            f"| {family} | {n} | {over[0]} | {over[1]} ({fastest['name']}) | {unrest} | {lag} | {', '.join(by)} |"
        )
    lines.append(
        f"\nDominated (a fixed window is better in throughput, non-stationarity or mean lag beyond its interval and "
        f"by 2%, and worse in none): {beaten} of {total}."
    )
    return "\n".join(lines) + "\n"


def _budgets(rows: Sequence[Row]) -> str:
    """Which N and window are the fastest within a lag budget."""
    lines = [
        "## The fastest within a lag budget L, N free\n",
        "| family | L | fixed | with 0.3 N | adaptive |",
        "|-|-|-|-|-|",
    ]
    for (family,), mine in groups(rows, "family"):
        for budget in BUDGETS:
            legal = [r for r in mine if mean(r, "lag_bound") <= budget and not r["escape"][0]]
            kinds = (
                fixed(legal),
                [r for r in legal if r["fraction"] == 0.3],
                [r for r in legal if r["fraction"] is None],
            )
            best = [max(kind, key=lambda r: mean(r, "items_per_min"), default=None) for kind in kinds]
            shown = [f"{cell(r, 'items_per_min')} (N={r['n']}, {r['name']})" if r else "none" for r in best]
            lines.append(f"| {family} | {budget} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _escape(rows: Sequence[Row]) -> str:
    """Stalls with and without the escape, and what it costs."""
    lines = ["## The straggler escape\n"]
    lines += [
        "| family | N | window | longest wait for a step (min) | items/min | lag max (bound) | parked | died stale |"
    ]
    lines.append("|-|-|-|-|-|-|-|-|")
    for (family, n), mine in groups(rows, "family", "n"):
        if not any(r["escape"][0] for r in mine):
            continue
        for fraction in (0.3, None):
            for escape in (False, True):
                r = at(mine, fraction, escape=escape)
                lag = f"{max(run['lag_max'] for run in r['runs']):.0f} ({mean(r, 'lag_bound'):.0f})"
                lines.append(
                    f"| {family} | {n} | {r['name']} | {cell(r, 'stall_min', 1)} | {cell(r, 'items_per_min')} | {lag} "
                    f"| {mean(r, 'parked'):.1f} | {mean(r, 'stale'):.1f} |"
                )
    return "\n".join(lines) + "\n"


def _all(rows: Sequence[Row]) -> str:
    lines = [
        "## Everything\n",
        "| family | N | window | L | items/min | mean lag | non-stationarity |",
        "|-|-|-|-|-|-|-|",
    ]
    for r in rows:
        lag = f"{mean(r, 'lag_bound'):.0f}"
        figures = f"{cell(r, 'items_per_min')} | {cell(r, 'lag_mean', 1)} | {cell(r, 'nonstationarity')}"
        lines.append(f"| {r['family']} | {r['n']} | {r['name']} | {lag} | {figures} |")
    return "\n".join(lines) + "\n"


def write_plots(rows: Sequence[Row], out: Path) -> None:
    """Throughput against non-stationarity with most slots and twice as many places; and the stalls."""
    slots = max(r["concurrency"] for r in rows)
    largest = [r for r in rows if (r["concurrency"], r["n"]) == (slots, 2 * slots)]
    by_family = groups(largest, "family")
    columns = min(4, len(by_family))
    height = -(-len(by_family) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(4.4 * columns, 3.6 * height), layout="constrained", squeeze=False
    )
    for axis, ((family,), mine) in zip(axes.flat, by_family, strict=False):
        _front(axis, family, mine)
    figure.savefig(out / "front.png", dpi=100, metadata={"Software": None})
    plt.close(figure)
    stalled = [(name, mine) for (name,), mine in by_family if any(r["escape"][0] for r in mine)]
    height = -(-len(stalled) // 2)
    figure, axes = plt.subplots(height, 2, figsize=(12, 3.6 * height), layout="constrained", squeeze=False)
    for axis in axes.flat[len(stalled) :]:
        axis.remove()
    for axis, (family, mine) in zip(axes.flat, stalled, strict=False):
        axis.barh([f"{r['name']} ({mean(r, 'lag_bound'):.0f})" for r in mine], [mean(r, "stall_min") for r in mine])
        axis.set_title(family, fontsize=9)
        axis.set_xlabel("longest wait for a step (min); in brackets: lag bound")
    figure.savefig(out / "stall.png", dpi=100, metadata={"Software": None})
    plt.close(figure)


def _front(axis: Any, family: str, mine: Sequence[Row]) -> None:
    for r in mine:
        x, y = (r["figures"][key] for key in ("nonstationarity", "items_per_min"))
        errors = [[[f["mean"] - f["low"]], [f["high"] - f["mean"]]] for f in (x, y)]
        marker = "*" if r["fraction"] is None else "o"
        label = f"{r['name']}, L={mean(r, 'lag_bound'):.0f}"
        axis.errorbar(x["mean"], y["mean"], xerr=errors[0], yerr=errors[1], fmt=marker, label=label, capsize=2)
    axis.set_title(family, fontsize=8)
    axis.set_xlabel("non-stationarity (1: random order)", fontsize=8)
    axis.set_ylabel("items per minute", fontsize=8)
    axis.legend(fontsize=6)
