"""The picture of `forge eval`: every scaffold's mean with its interval."""

from __future__ import annotations

from pathlib import Path

from forge.report.drawing import BLUE, GREY, axes_of
from forge.types import Json

#: scaffolds that are drawn; of more, the lowest and the highest half of as many
SHOWN = 60


def draw(result: Json, path: Path) -> None:
    """Of what `scores.json` holds, scaffolds by their mean."""
    rows = sorted(result["scaffolds"], key=lambda row: row["mean"])
    if len(rows) > SHOWN:
        rows = [*rows[: SHOWN // 2], *rows[-SHOWN // 2 :]]
    figure, (ax,) = axes_of(1, 1.4 + 0.17 * len(rows))
    places = range(len(rows))
    ax.hlines(places, [row["low"] for row in rows], [row["high"] for row in rows], color=GREY, lw=2.5)
    ax.plot([row["mean"] for row in rows], places, "o", ms=4, color=BLUE)
    ax.set_yticks(places, [row["scaffold"] for row in rows], fontsize=7)
    between = result["spread"]
    told = f", standard deviation between scaffolds {between['sd']:.3f}" if between else ""
    ax.set(xlabel=f"mean reward of {result['tasks']} tasks, 95% interval", title=f"{result['model']}{told}")
    ax.set_xlim(-0.02, 1.02)
    figure.savefig(path, dpi=120)
