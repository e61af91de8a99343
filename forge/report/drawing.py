"""What all pictures of a report share: colours, the style, a run's records, axes in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

from forge.metrics import RunFold
from forge.types import Json

BLUE, ORANGE, GREEN, RED, GREY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999", "#8A5FBF"

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.dpi": 110,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True, slots=True)
class Context:
    """What every picture may use. `evals`: `evaluation.json`, or None."""

    run: RunFold
    summary: Json
    n: int
    window: int | None
    instances: int
    evals: Json | None

    @property
    def wall_s(self) -> float:
        """Never 0, so that an axis has a length."""
        return self.run.wall_s or 1.0


def axes_of(columns: int, height: float, **ratios: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, gridspec_kw=ratios or None)
    return figure, axes[0]
