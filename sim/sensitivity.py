"""`sensitivity.png`: the figures of all candidates against what was varied, with confidence bands over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from forge.metrics.intervals import Interval
from sim.choose import LAG, OBJECTIVES, SPEED, UNREST, Judged
from sim.tunable import Value

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Read = Callable[[Judged], Interval | None]  # None: its runs are too short

_PANELS: tuple[tuple[str, Read], ...] = (
    ("trained tokens/s", lambda j: j.figures.get(SPEED)),
    ("largest lag (items)", lambda j: j.figures.get(LAG)),
    ("non-stationarity (1: random order)", lambda j: j.figures.get(UNREST)),
    ("engine idle share", lambda j: j.figures.get("engine_idle_fraction")),
    ("trainer idle share", lambda j: j.figures.get("trainer_idle_fraction")),
)
_STYLES = ("-", "--", ":", "-.")
#: keys that a window, N and C tell whole
_QUEUE = {"policy.scheduler.kind", "policy.scheduler.fraction", "queue.n", "queue.concurrency"}


def plot(judged: Sequence[Judged], chosen: Judged, title: str, path: Path) -> None:
    """Of windows, N and C: curves against W. Of any other keys: a row of panels each."""
    paths = list(dict.fromkeys(key for j in judged for key, _ in j.candidate.point))
    wide = bool(set(paths) - _QUEUE)
    figure = _against_keys(judged, chosen, paths) if wide else _against_windows(judged, chosen)
    figure.suptitle(f"{title}; {'means' if wide else 'bands: 95%'} over seeds", fontsize=11)
    # No software version in the file: the same sweep gives the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


# --- windows ------


def _against_windows(judged: Sequence[Judged], chosen: Judged) -> Any:
    """One line per N (colour) and C (style); the sixth panel is the legend."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    for axis, (label, read) in zip(axes.flat, _PANELS, strict=False):
        _panel(axis, judged, read)
        if star := read(chosen):
            axis.plot(_window(chosen), star.mean, "k*", markersize=14, label="chosen", zorder=5)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("window W (items)")
        axis.grid(alpha=0.3)
    axes[1, 2].axis("off")
    axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", fontsize=9, frameon=False)
    return figure


def _panel(axis: Any, judged: Sequence[Judged], read: Read) -> None:
    for i, n in enumerate(sorted({j.candidate.n for j in judged})):
        mine = [j for j in judged if j.candidate.n == n]
        for k, c in enumerate(sorted({j.candidate.concurrency for j in mine})):
            line = sorted((j for j in mine if j.candidate.concurrency == c), key=_window)
            points = [(_window(j), value) for j in line if (value := read(j))]
            windows, values = [at for at, _ in points], [value for _, value in points]
            style: dict[str, Any] = {"color": f"C{i % 10}", "linestyle": _STYLES[k % len(_STYLES)]}
            axis.plot(windows, [v.mean for v in values], marker="o", markersize=4, label=f"N={n}, C={c}", **style)
            low, high = [v.low for v in values], [v.high for v in values]
            axis.fill_between(windows, low, high, color=f"C{i % 10}", alpha=0.08, linewidth=0)


def _window(judged: Judged) -> int:
    """None is any of N."""
    c = judged.candidate
    return c.n if c.window is None else c.window


# --- any keys ------


def _against_keys(judged: Sequence[Judged], chosen: Judged, paths: Sequence[str]) -> Any:
    """A dot a candidate that has the key; those dropped early are pale."""
    rows = len(paths)
    figure, axes = plt.subplots(rows, len(OBJECTIVES), figsize=(14, 3.0 * rows), layout="constrained", squeeze=False)
    most = max(len(j.runs) for j in judged)
    for row, path in zip(axes, paths, strict=True):
        mine = [(dict(j.candidate.point)[path], j) for j in judged if path in dict(j.candidate.point)]
        places = _places([value for value, _ in mine])
        for axis, (key, (label, _)) in zip(row, OBJECTIVES.items(), strict=True):
            known = [(places[value], j.figures[key].mean, j) for value, j in mine if key in j.figures]
            pale = [0.9 if len(j.runs) == most else 0.3 for _, _, j in known]
            axis.scatter([x for x, _, _ in known], [y for _, y, _ in known], s=18, alpha=pale, color="C0")
            for x, y, j in known:
                if j.candidate == chosen.candidate:
                    axis.plot(x, y, "k*", markersize=13, zorder=5)
            axis.set_title(label, fontsize=10)
            axis.set_xlabel(path, fontsize=9)
            axis.grid(alpha=0.3)
            if any(isinstance(value, str) for value in places):
                axis.set_xticks(list(places.values()), [str(value) for value in places], fontsize=8)
    return figure


def _places(values: Sequence[Value]) -> dict[Value, float]:
    """Where each value stands on its axis: numbers where they are, words side by side."""
    if any(isinstance(value, str) for value in values):
        return {value: float(i) for i, value in enumerate(dict.fromkeys(values))}
    return {value: float(value) for value in values}
