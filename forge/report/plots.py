"""The report's pictures, each a function from a run's records to a figure, with one sentence on what to look for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator, NullFormatter, PercentFormatter

from forge.metrics import RunFold
from forge.metrics.stats import smooth, smoothing_window
from forge.metrics.summary import FEATURES
from forge.report import series
from forge.types import Json

BLUE, ORANGE, GREEN, RED, GREY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999", "#8A5FBF"

STATE_COLOURS = {"running": "#9CC9E8", "blocked": ORANGE, "finished": GREEN, "taken": "#D4D4D4"}
STATE_LABELS = {
    "running": "running",
    "blocked": "finished, outside the window",
    "finished": "finished, inside the window",
    "taken": "taken, until committed",
}

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


def _figure(columns: int, height: float, **ratios: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(9.6, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, gridspec_kw=ratios or None)
    return figure, axes[0]


def reward(context: Context) -> Figure:
    """Reward against wall time and against steps."""
    curve = np.array(context.summary["reward"]["curve"], dtype=np.float64).reshape(-1, 3)
    figure, axes = _figure(2, 3.3)
    held_out = _held_out(context)
    for ax, column, label in ((axes[0], 0, "seconds of the run"), (axes[1], 1, "trainer step")):
        ax.plot(curve[:, column], curve[:, 2], ".", ms=4, color=GREY, alpha=0.6, label="batch mean (sampled)")
        if len(curve):
            window = smoothing_window(len(curve))
            ax.plot(curve[:, column], smooth(curve[:, 2].tolist(), window), color=BLUE, lw=1.8, label="moving mean")
        if held_out:
            points = [(t if column == 0 else step, mean) for t, step, mean in held_out]
            ax.plot(*zip(*points, strict=True), "D--", ms=6, lw=0.8, color=RED, label="held-out tasks")
        ax.set(xlabel=label, title="Reward over time" if column == 0 else "Reward over steps")
        ax.set_ylim(bottom=min(0.0, float(curve[:, 2].min()) if len(curve) else 0.0))
    axes[0].set_ylabel("mean reward")
    axes[0].legend(loc="best")
    return figure


def _held_out(context: Context) -> list[tuple[float, int, float]]:
    """Seconds, step, mean: from the trace, and from `evaluation.json` where the trace holds none."""
    found = [(e.t, e.step, e.mean) for e in context.run.evaluations]
    if not found and context.evals:
        ends = {"start": (0.0, 0), "end": (context.run.wall_s, context.run.step)}
        for label, (t, step) in ends.items():
            if scores := context.evals.get(label, {}).get("scores"):
                found.append((t, step, sum(scores.values()) / len(scores)))
    return found


def queue(context: Context) -> Figure:
    """Positions against time in the middle of the run, and how many items are in each state throughout."""
    run, found = context.run, series.spans(context.run, context.window)
    figure, (left, right) = _figure(2, 4.6, width_ratios=(1.7, 1))
    low, high = _middle(context)
    shown = [s for s in found if low <= s.position < high]
    for state, colour in STATE_COLOURS.items():
        of = [s for s in shown if s.state == state]
        left.hlines(
            [s.position for s in of],
            [s.start_s for s in of],
            [s.end_s for s in of],
            colors=colour,
            lw=max(1.2, min(5.0, 220 / max(1, high - low))),
            label=STATE_LABELS[state],
        )
    taken = [(i.taken_s, i.position) for i in run.items.values() if i.taken_s is not None and low <= i.position < high]
    dead = [(i.dead_s, i.position) for i in run.items.values() if i.dead_s is not None and low <= i.position < high]
    left.plot(*_columns(taken), ".", ms=4, color="black", label="taken")
    left.plot(*_columns(dead), "x", ms=6, mew=1.6, color=RED, label="dead")
    start = min((s.start_s for s in shown), default=0.0)
    end = max((s.end_s for s in shown), default=1.0)
    _window_edges(left, context, start, end)
    left.set(
        xlim=(start, end), ylim=(low - 1, high), xlabel="seconds of the run", ylabel="position", title="Queue window"
    )
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(visible=False)
    grid = np.linspace(0.0, context.wall_s, 200)
    stacked = series.counts(found, grid)
    right.stackplot(grid, list(stacked.values()), colors=[STATE_COLOURS[s] for s in stacked], step="post")
    right.axvspan(start, end, color="black", alpha=0.06, lw=0)
    right.set(xlabel="seconds of the run", ylabel="items", title="Items by state, whole run", xlim=(0, context.wall_s))
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def _middle(context: Context) -> tuple[int, int]:
    """A range of positions narrow enough to read: about three generation batches in the middle of the run."""
    total = len(context.run.items)
    width = min(total, max(24, min(3 * context.n, 110)))
    low = (total - width) // 2
    return low, low + width


def _window_edges(ax: Any, context: Context, start: float, end: float) -> None:
    grid = np.linspace(start, end, 2000)
    head = series.head_at(context.run, grid)
    ax.plot(grid, head - 0.5, color="black", lw=1.0, label="head")
    if context.window is not None:
        ax.plot(grid, head + context.window - 0.5, color="black", lw=1.0, ls="--", label="end of the window")


def _columns(points: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [t for t, _ in points], [p for _, p in points]


def lag(context: Context) -> Figure:
    """Lag of every item consumed, against its bound."""
    done = [i for i in context.run.consumed() if i.lag_items is not None and i.taken_s is not None]
    lags = [i.lag_items or 0 for i in done]
    bound = context.summary["lag_items_bound"]
    figure, (left, right) = _figure(2, 3.0, width_ratios=(2.2, 1))
    left.plot([i.taken_s for i in done], lags, ".", ms=4, color=BLUE, alpha=0.7)
    left.set(xlabel="seconds of the run, when taken", ylabel="lag (items)", title="Lag of every item")
    top = max([*lags, bound or 0], default=1)
    right.hist(lags, bins=np.arange(-0.5, top + 1.5), orientation="horizontal", color=BLUE, alpha=0.8)
    right.set(xlabel="items", title="How often")
    for ax in (left, right):
        if bound is not None:
            ax.axhline(bound, color=RED, lw=1.4)
        ax.set_ylim(-0.8, top * 1.12 + 1)
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    if bound is not None:
        left.annotate(
            f"bound N + W - 2 = {bound}", (0.01, bound), (0, 3), ("axes fraction", "data"), "offset points", color=RED
        )
    return figure


def busy(context: Context) -> Figure:
    """Busy share of engines and trainer over time, and the seconds of each part."""
    run = context.run
    figure, (left, right) = _figure(2, 3.0, width_ratios=(2.2, 1))
    bins = max(8, min(40, len(run.steps) // 3))
    edges = np.linspace(0.0, context.wall_s, bins + 1)
    engine, trainer = series.busy_shares(run, context.instances, edges)
    if run.usage:
        left.stairs(engine, edges, color=BLUE, lw=1.6, baseline=None, label="engines")
    left.stairs(trainer, edges, color=ORANGE, lw=1.6, baseline=None, label="trainer")
    for t in run.resumed_s:
        left.axvline(t, color=RED, lw=1.0, ls=":", label="resumed")
    left.set(xlabel="seconds of the run", ylabel="busy", title="Busy shares", ylim=(0, 1.08), xlim=(0, edges[-1]))
    left.yaxis.set_major_formatter(PercentFormatter(1.0))
    handles, labels = left.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    left.legend(unique.values(), unique.keys(), loc="lower right", ncols=3)
    parts = {name: seconds or 0.0 for name, seconds in context.summary["parts"].items()}
    bars = right.barh(list(parts), list(parts.values()), color=[BLUE, ORANGE, GREEN, PURPLE], height=0.6)
    right.bar_label(bars, [f" {seconds:.3g} s" for seconds in parts.values()], fontsize=8)
    right.invert_yaxis()
    right.margins(x=0.25)
    right.set(xlabel="seconds, summed over instances", title="Time by part")
    right.grid(visible=False, axis="y")
    return figure


def latency(context: Context) -> Figure:
    """Distributions of time to first token and time per output token."""
    figure, axes = _figure(2, 2.8)
    named = (
        (axes[0], context.run.ttft_s, "Time to first token"),
        (axes[1], context.run.tpot_s, "Time per output token"),
    )
    for ax, values, title in named:
        ordered = np.sort(np.maximum(values, 1e-6))
        ax.set(xlabel="seconds", title=title, ylim=(0, 1.02))
        ax.yaxis.set_major_formatter(PercentFormatter(1.0))
        if not len(ordered):
            ax.text(0.5, 0.5, "none measured", ha="center", transform=ax.transAxes, color=GREY)
            continue
        ax.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post", color=BLUE, lw=1.6)
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        ax.xaxis.set_minor_formatter(NullFormatter() if ordered[-1] > 8 * ordered[0] else FormatStrFormatter("%g"))
        for share in (0.5, 0.9, 0.99):
            at = float(np.quantile(ordered, share))
            ax.plot([at], [share], "o", ms=4, color=RED)
            ax.annotate(
                f"p{round(100 * share)} {at:.3g} s", (at, share), (5, -9), textcoords="offset points", fontsize=8
            )
    axes[0].set_ylabel("share of requests")
    return figure


def mixture(context: Context) -> Figure:
    """Batch means of length, duration and difficulty per step: what greed does to the data's distribution."""
    figure, axes = _figure(3, 2.6)
    for ax, (name, of) in zip(axes, FEATURES.items(), strict=True):
        batches = [[v for i in batch if (v := of(i)) is not None] for batch in context.run.batches()]
        batches = [batch for batch in batches if batch]
        pooled = np.array([v for batch in batches for v in batch])
        ax.set(xlabel="trainer step", title=name.replace("_", " "))
        if len(pooled) < 2:
            continue
        centre, half = pooled.mean(), 2 * pooled.std() / np.sqrt(np.mean([len(b) for b in batches]))
        ax.axhspan(centre - half, centre + half, color=GREEN, alpha=0.15, lw=0)
        ax.axhline(centre, color=GREEN, lw=1.0)
        ax.plot(range(1, len(batches) + 1), [np.mean(b) for b in batches], ".-", ms=4, lw=0.6, color=BLUE)
    axes[0].set_ylabel("mean of the step's batch")
    return figure


#: file name -> (drawing, what to look for), in the order of the report
PLOTS = {
    "reward.png": (
        reward,
        "Look for a rise that held-out tasks share: batch means are sampled, the diamonds are tasks never trained on.",
    ),
    "queue.png": (
        queue,
        "Look for orange: finished work that the window holds back until the head moves; a long pale bar at the head "
        "is the straggler everyone waits for.",
    ),
    "lag.png": (
        lag,
        "Look for dots near the red line: no item may be above it, and a band far below means N could grow.",
    ),
    "busy.png": (
        busy,
        "Look for the lower line: whoever is idle waits for the other, so the higher one is the bottleneck.",
    ),
    "latency.png": (
        latency,
        "Look for a long tail to the right: requests that queued, or were prefilled behind others.",
    ),
    "mixture.png": (
        mixture,
        "Look for waves outside the green band (95% of batches under random order): the scheduler feeds easy and short "
        "work first.",
    ),
}
