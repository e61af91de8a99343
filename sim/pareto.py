"""`pareto.png` and `importance.png`: what can be traded for what, and which keys mattered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

from forge.report.drawing import BLUE, GREEN, GREY, ORANGE, RED, STYLE, axes_of
from sim.choose import OBJECTIVES, SPEED, Judged
from sim.tune import Tuned

_OTHERS = [key for key in OBJECTIVES if key != SPEED]
_COLOURS = (BLUE, ORANGE, GREEN, RED)


def plot_front(tuned: Tuned, path: Path) -> None:
    """Throughput against each of what it costs; a candidate dropped early stands where its few seeds put it."""
    most = len(tuned.seeds)
    with mpl.rc_context(STYLE):
        figure, axes = axes_of(len(_OTHERS), 3.6)
        for axis, key in zip(axes, _OTHERS, strict=True):
            known = [j for j in tuned.judged if key in j.figures and SPEED in j.figures]
            front = [j for j in known if j.pareto]
            rest = [j for j in known if not j.pareto and len(j.runs) == most]
            dropped = [j for j in known if len(j.runs) < most]
            _points(axis, dropped, key, "dropped early", marker="x", color=GREY, s=18, linewidths=0.8)
            _points(axis, rest, key, "beaten by another", marker="o", color=GREY, s=22)
            _points(axis, front, key, "beaten by none in everything", marker="o", color=BLUE, s=26)
            _points(
                axis, [tuned.own], key, "the scenario's own", marker="s", facecolors="none", edgecolors=ORANGE, s=70
            )
            _points(axis, [tuned.choice.chosen], key, "chosen", marker="*", color="black", s=110, zorder=4)
            axis.set_xlabel(OBJECTIVES[key][0])
        axes[0].set_ylabel(OBJECTIVES[SPEED][0])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
        figure.suptitle(f"{tuned.scenario.name}: means over seeds", fontsize=10)
        _save(figure, path)


def _points(axis: Any, those: list[Judged], key: str, label: str, **style: Any) -> None:
    shown = [j for j in those if key in j.figures]
    axis.scatter([j.figures[key].mean for j in shown], [j.figures[SPEED].mean for j in shown], label=label, **style)


def plot_importances(weights: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Bars by key, one for every objective."""
    paths = list(dict.fromkeys(path for shares in weights.values() for path in shares))[::-1]
    with mpl.rc_context(STYLE):
        figure, axes = axes_of(1, 1.4 + 0.6 * max(1, len(paths)))
        axis, thick = axes[0], 0.8 / len(OBJECTIVES)
        for i, (key, shares) in enumerate(weights.items()):
            at = [row + 0.4 - (i + 0.5) * thick for row in range(len(paths))]
            lengths = [100 * shares.get(one, 0.0) for one in paths]
            axis.barh(at, lengths, height=thick, color=_COLOURS[i], label=OBJECTIVES[key][0])
        axis.set_yticks(range(len(paths)), paths)
        axis.set_xlim(0, 100)
        axis.set_xlabel("% of the variance between candidates that the key explains alone")
        figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    # No software version in the file: the same tuning gives the same bytes.
    figure.savefig(path, metadata={"Software": None})
