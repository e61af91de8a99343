"""The report's pictures, each a function from a run's records to a figure, with one sentence on what to look for."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from forge.metrics.stats import smooth, smoothing_window
from forge.metrics.summary import FEATURES
from forge.report import series
from forge.report.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Context, axes_of
from forge.report.plots_serving import busy, instances, latency

STATE_COLOURS = {"running": "#9CC9E8", "blocked": ORANGE, "finished": GREEN, "taken": "#D4D4D4"}
STATE_LABELS = {
    "running": "running",
    "blocked": "finished, outside the window",
    "finished": "finished, inside the window",
    "taken": "taken, until committed",
}


def reward(context: Context) -> Figure:
    """Reward against wall time and against steps."""
    curve = np.array(context.summary["reward"]["curve"], dtype=np.float64).reshape(-1, 3)
    figure, axes = axes_of(2, 3.3)
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
    figure, (left, right) = axes_of(2, 4.6, width_ratios=(1.7, 1))
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
    """Lag of every item consumed, against its bound, and how old the weights were that sampled it."""
    done = [i for i in context.run.consumed() if i.lag_items is not None and i.taken_s is not None]
    lags = [i.lag_items or 0 for i in done]
    bound = context.summary["lag_items_bound"]
    figure, (left, right, versions) = axes_of(3, 3.0, width_ratios=(2.2, 0.9, 1.1))
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
    _staleness(versions, context)
    return figure


def _staleness(ax: Any, context: Context) -> None:
    stale = [lag for i in context.run.consumed() if (lag := i.lag_versions) is not None]
    ax.set(xlabel="trainer steps", ylabel="items", title="Age of the weights")
    if not stale:
        ax.text(0.5, 0.5, "none known", ha="center", transform=ax.transAxes, color=GREY)
        return
    ax.hist(stale, bins=np.arange(-0.5, max(stale) + 1.5), color=PURPLE, alpha=0.8)
    mean = sum(stale) / len(stale)
    ax.axvline(mean, color="black", lw=1.0, ls="--")
    ax.annotate(f"mean {mean:.2g}", (mean, 1.0), (3, -9), ("data", "axes fraction"), "offset points", fontsize=8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def mixture(context: Context) -> Figure:
    """Batch means of length, duration and difficulty per step: what greed does to the data's distribution."""
    figure, axes = axes_of(3, 2.6)
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
        "Look for dots near the red line: no item may be above it, and a band far below means N could grow. The age of "
        "the weights is that of the oldest token's when its item was trained on.",
    ),
    "busy.png": (
        busy,
        "Look for the lower line: whoever is idle waits for the other, so the higher one is the bottleneck.",
    ),
    "instances.png": (
        instances,
        "Look for pale stripes: an instance that is down, or that the router starves while others are full.",
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
