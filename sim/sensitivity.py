"""`sensitivity.png`: throughput, lag, idle time and non-stationarity against W, with confidence bands over seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

from forge.metrics.intervals import Interval
from sim.choose import Judged

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Read = Callable[[Judged], Interval | None]  # None: its runs are too short

_PANELS: tuple[tuple[str, Read], ...] = (
    ("trained tokens/s", lambda j: j.figures.get("trained_tokens_per_s")),
    ("largest lag (items)", lambda j: j.figures.get("lag_items_max")),
    ("non-stationarity (1: random order)", lambda j: j.figures.get("nonstationarity")),
    ("engine idle share", lambda j: j.figures.get("engine_idle_fraction")),
    ("trainer idle share", lambda j: j.figures.get("trainer_idle_fraction")),
)
_STYLES = ("-", "--", ":", "-.")


def plot(judged: Sequence[Judged], chosen: Judged, title: str, path: Path) -> None:
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
    figure.suptitle(title, fontsize=11)
    # No software version in the file: the same sweep gives the same bytes.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


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
    return judged.candidate.window
