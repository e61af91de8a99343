"""Pictures of the serving side: how busy engines and trainer were, what each instance did, how long tokens took."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, MaxNLocator, NullFormatter, PercentFormatter

from forge.report import series
from forge.report.drawing import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, Context, axes_of

POINTS = 4000  # of a curve


def busy(context: Context) -> Figure:
    """Busy share of engines and trainer over time, and the seconds of each part."""
    run = context.run
    figure, (left, right) = axes_of(2, 3.0, width_ratios=(2.2, 1))
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


def instances(context: Context) -> Figure:
    """Busy share of every instance over time, and how much of the prompts its KV cache was believed to hold."""
    run = context.run
    has_cache = any(run.prompts[2::3])
    count = len(run.instance_usage[0][1]) if run.instance_usage else 0
    figure, axes = axes_of(2 if has_cache else 1, min(4.6, 1.5 + 0.25 * max(1, count)))
    edges = np.linspace(0.0, context.wall_s, max(8, min(120, len(run.instance_usage) // 2)) + 1)
    axes[0].set(xlabel="seconds of the run", ylabel="instance", title="Busy share of every instance")
    axes[0].grid(visible=False)
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    if count:
        rows = np.arange(count + 1) - 0.5
        drawn = axes[0].pcolormesh(edges, rows, series.instance_shares(run, edges), cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(drawn, ax=axes[0], format=PercentFormatter(1.0))
        axes[0].invert_yaxis()
    else:
        axes[0].text(0.5, 0.5, "none measured", ha="center", transform=axes[0].transAxes, color=GREY)
    if has_cache:
        axes[1].stairs(series.cached_shares(run, edges), edges, color=GREEN, lw=1.6, baseline=None)
        axes[1].set(xlabel="seconds of the run", title="Prompt tokens believed cached", ylim=(0, 1.02))
        axes[1].yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def latency(context: Context) -> Figure:
    """Distributions of time to first token and time per output token."""
    figure, axes = axes_of(2, 2.8)
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
        shown = np.unique(np.linspace(0, len(ordered) - 1, POINTS).astype(int))  # of millions, as many as a line shows
        ax.step(ordered[shown], (shown + 1) / len(ordered), where="post", color=BLUE, lw=1.6)
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
