"""Several runs against each other: groups of the same policy over seeds, their intervals, and whether the simulator
predicted their order.

Writes `comparison.html`, `comparison.png` and `comparison.json` into a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from forge.metrics import summarise
from forge.metrics.intervals import Interval, mean_interval
from forge.report.drawing import BLUE, ORANGE, STYLE
from forge.report.page import render, save
from forge.report.prediction import COMPARED, lookup
from forge.runs import RunFolder, write_json, write_text
from forge.scenario import Scenario
from forge.types import ForgeError, Json

#: whose order the simulator has to have predicted wherever measured intervals do not overlap
ORDERED = ("throughput_tokens_per_s", "nonstationarity")
J = "j_tokens"
DRAWN = (*ORDERED, J)
SHOWN = (*DRAWN, "items_per_s", "lag_items_mean", "engine_idle_fraction", "trainer_idle_fraction")


LABELS = COMPARED | {J: ("J (trained, times modelled efficiency)", "tokens/s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs of one policy. `measured` and `predicted` map figures to intervals over its seeds; J's holds the model's
    range as well."""

    name: str
    seeds: tuple[int, ...]
    measured: dict[str, Interval]
    predicted: dict[str, Interval]
    law_violations: int

    def to_dict(self) -> Json:
        figures = {
            key: {name: interval.to_dict() for name, interval in getattr(self, key).items()}
            for key in ("measured", "predicted")
        }
        return {"name": self.name, "seeds": self.seeds, **figures, "law_violations": self.law_violations}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Two groups on one figure. `verdict`: "as predicted", "against the prediction", or why there is none."""

    key: str
    higher: str
    lower: str
    verdict: str


def write_comparison(folders: Sequence[RunFolder], out: Path) -> Path:
    """Compare runs (schedulers x seeds, say); returns the page's path. Raises ForgeError with fewer than two groups."""
    groups = gather(folders)
    if len(groups) < 2:
        raise ForgeError("a comparison needs runs of at least two policies")
    orders = [order for key in ORDERED for a, b in combinations(groups, 2) if (order := judge(key, a, b))]
    out.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        picture = save(_plot(groups), out / "comparison.png")
    write_json(
        out / "comparison.json", {"groups": [g.to_dict() for g in groups], "orders": [asdict(o) for o in orders]}
    )
    columns = [(key, *LABELS[key]) for key in SHOWN]
    path = out / "comparison.html"
    values = {"groups": groups, "orders": orders, "columns": columns, "picture": picture, "best": best_by_j(groups)}
    write_text(path, render("comparison.html", **values))
    return path


def gather(folders: Sequence[RunFolder]) -> list[Group]:
    """Group runs by world and scheduler, in the order first met."""
    members: dict[str, list[tuple[Json, Json | None]]] = {}
    for folder in folders:
        scenario = folder.scenario()
        summary = folder.read("summary.json") or summarise(folder.events(), scenario)
        members.setdefault(_name(scenario, summary), []).append((summary, folder.read("prediction.json")))
    return [_group(name, runs) for name, runs in members.items()]


def _name(scenario: Scenario, summary: Json) -> str:
    scheduler = scenario.policy.scheduler
    window = scheduler.window(scenario.queue.n)
    return (
        f"{scheduler.kind} (W = {window}, {summary['world']})" if window else f"{scheduler.kind} ({summary['world']})"
    )


def _group(name: str, runs: list[tuple[Json, Json | None]]) -> Group:
    measured, predicted = {}, {}
    for key in SHOWN:
        if key == J:
            continue
        values = [v for summary, _ in runs if (v := lookup(summary, key)) is not None]
        if values:
            measured[key] = mean_interval(values)
        guesses = [p["figures"][key]["mean"] for _, p in runs if p and key in p.get("figures", {})]
        if guesses:
            predicted[key] = mean_interval(guesses)
    if j := j_interval([summary for summary, _ in runs]):
        measured[J] = j
    return Group(
        name=name,
        seeds=tuple(summary["seed"] for summary, _ in runs),
        measured=measured,
        predicted=predicted,
        law_violations=sum(len(summary["law_violations"]) for summary, _ in runs),
    )


def j_interval(summaries: Sequence[Json]) -> Interval | None:
    """From the least J the model and the scatter over seeds allow to the most; None where a run has no J."""
    ranges = [j for summary in summaries if (j := summary.get(J)) is not None]
    if len(ranges) < len(summaries):
        return None
    low, high = (mean_interval([j[end] for j in ranges]) for end in ("low", "high"))
    # One seed says nothing of the scatter: then the interval is the model's alone.
    bounds = (low.low, high.high) if low.is_bounded else (low.mean, high.mean)
    return Interval(mean=(low.mean + high.mean) / 2, low=max(0.0, bounds[0]), high=bounds[1], n=len(ranges))


def best_by_j(groups: Sequence[Group]) -> str | None:
    """The group whose J lies above all others'; None where intervals overlap, or one has too few seeds or no J."""
    known = [(j, group.name) for group in groups if (j := group.measured.get(J)) is not None and j.n > 1]
    if len(known) < len(groups):
        return None
    best, name = max(known, key=lambda pair: pair[0].low)
    return None if any(other != name and j.overlaps(best) for j, other in known) else name


def judge(key: str, a: Group, b: Group) -> Order | None:
    """Compare the measured order of two groups with the predicted one; None where a figure is missing."""
    if key not in a.measured or key not in b.measured:
        return None
    if a.measured[key].mean < b.measured[key].mean:
        a, b = b, a
    if not (a.measured[key].is_bounded and b.measured[key].is_bounded):
        verdict = "too few seeds for an interval"
    elif a.measured[key].overlaps(b.measured[key]):
        verdict = "intervals overlap: no order to predict"
    elif key not in a.predicted or key not in b.predicted:
        verdict = "no prediction"
    else:
        same = a.predicted[key].mean > b.predicted[key].mean
        verdict = "as predicted" if same else "against the prediction"
    return Order(key=key, higher=a.name, lower=b.name, verdict=verdict)


def _plot(groups: list[Group]) -> Figure:
    """Throughput, non-stationarity and J per group: measured with 95% intervals, predicted beside it."""
    figure = Figure(figsize=(9.6, 1.4 + 0.5 * len(groups)), layout="constrained")
    axes = figure.subplots(1, len(DRAWN), sharey=True)
    for ax, key in zip(axes, DRAWN, strict=True):
        for row, group in enumerate(groups):
            _point(ax, row - 0.1, group.measured.get(key), BLUE, "measured" if row == 0 else None)
            _point(ax, row + 0.15, group.predicted.get(key), ORANGE, "predicted" if row == 0 else None)
        label, unit = LABELS[key]
        ax.set(xlabel=unit, title=label.partition(" (")[0])
    axes[0].set_yticks(range(len(groups)), [g.name for g in groups])
    axes[0].invert_yaxis()
    axes[1].axvline(1.0, color="black", lw=0.8, ls=":")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def _point(ax: object, y: float, interval: Interval | None, colour: str, label: str | None) -> None:
    if interval is None:
        return
    half = [[0.0], [0.0]]
    if interval.is_bounded:
        half = [[interval.mean - interval.low], [interval.high - interval.mean]]
    ax.errorbar([interval.mean], [y], xerr=half, fmt="o", ms=5, capsize=3, color=colour, label=label)  # type: ignore[attr-defined]
