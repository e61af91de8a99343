"""The charts of one run or of two beside each other: the same on every page that shows runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import streamlit as st

from dashboards import charts, comparison, frames, table
from dashboards.frames import Frame
from dashboards.records import Records
from dashboards.ui import chart, html, show
from forge.report.drawing import BLUE

Runs = Mapping[str, Records]  # one or two, by the name that the page gives them


ALL = "everything"


def sections(runs: Runs, key: str, *, newest: bool = False) -> None:
    """The figures, and the charts of one side of the runs at a time: a page of all of them is slow to draw.

    `newest`: the end of the runs is what matters, since they go on."""
    figures(runs)
    sides: dict[str, Callable[[], None]] = {
        "Queue window": lambda: queue(runs, key, newest=newest),
        "Lag and bias": lambda: lag_and_bias(runs),
        "Latency and KV": lambda: serving(runs),
        "Instances and idle shares": lambda: machines(runs),
    }
    if any(records.run.world == "live" for records in runs.values()):
        sides["Learning"] = lambda: reward(runs)
    chosen = st.segmented_control("Charts", [*sides, ALL], default="Queue window", key="charts") or "Queue window"
    for name, draw in sides.items():
        if chosen in (name, ALL):
            st.subheader(name, anchor=False)
            draw()


def figures(runs: Runs) -> None:
    """The table, J as intervals, and why what is missing is not known."""
    summaries = {name: records.summary() for name, records in runs.items()}
    html(table.figures(comparison.rows(*summaries.values()), list(summaries)))
    rows = [(n, s["j_tokens"]["low"], s["j_tokens"]["high"]) for n, s in summaries.items() if s["j_tokens"]]
    if rows:
        drawn = charts.intervals(rows, "J: trained tokens/s times modelled sample efficiency", "tokens/s")
        chart(drawn, "Look for bars that do not overlap: only then is one better by J, whatever samples are worth.")
    for name, summary in summaries.items():
        if broken := summary["law_violations"]:
            st.warning(f"{name}: the queue's laws are broken, first at {broken[0]}")
    with st.expander("What is not known, and why"):
        for name, summary in summaries.items():
            for label, reason in comparison.unknown(summary).items():
                st.markdown(f"- {name}: {label}: {reason}" if len(summaries) > 1 else f"- {label}: {reason}")


def queue(runs: Runs, key: str, *, newest: bool = False) -> None:
    """The queue window over time, in a range that can be chosen, and items by state throughout."""
    wall_s = max(records.wall_s for records in runs.values())
    first = next(iter(runs.values()))
    low, high = frames.default_range(first, newest=newest)
    if newest:
        start_s, end_s = low, high
    else:
        start_s, end_s = st.slider(
            "Seconds of the run shown", 0.0, wall_s, (low, min(high, wall_s)), format="%.4g", key=key
        )
    if end_s <= start_s:
        st.info("Choose a range of time with some length.")
        return
    for place, (name, records) in zip(st.columns(len(runs)), runs.items(), strict=True):
        with place:
            window = frames.queue_window(records, start_s, end_s)
            if not window.spans:
                st.info(f"{name}: no item was in the queue in these seconds.")
                continue
            title = f"Queue window: {name}" if len(runs) > 1 else "Queue window"
            chart(
                charts.queue_window(window, title, start_s, end_s),
                "Look for orange: finished work that the window holds back until the head moves; a long pale bar at "
                "the head is the straggler everyone waits for. Solid line: the head; dashed: the end of the window; "
                "dots: taken; red crosses: dead.",
                window.spans,
            )
            chart(
                charts.states(frames.states(records), "Items by state, whole run"),
                "Look for the grey: taken items wait for the trainer where it grows, engines are short where it is "
                "thin.",
            )


def lag_and_bias(runs: Runs) -> None:
    for place, (name, records) in zip(st.columns(len(runs)), runs.items(), strict=True):
        with place:
            found, bound = frames.lag(records), records.summary()["lag_items_bound"]
            if found:
                title = f"Lag of every item: {name}" if len(runs) > 1 else "Lag of every item"
                chart(
                    charts.lag(found, bound, title),
                    "Look for dots near the red line: none may be above it; a band far below means N could grow.",
                    found,
                )
    mixture = _together(runs, frames.mixture)
    features = list(dict.fromkeys(mixture.columns["feature"])) if mixture else []
    ages = _together(runs, frames.weights_age)
    places = st.columns(len(features) + 1)
    for place, feature in zip(places, features, strict=False):
        with place:
            show(charts.mixture(mixture, feature))
    with places[-1]:
        if ages:
            titles = ("age of the weights", "trainer steps", "items")
            show(charts.bars(ages, "age", "items", titles, height=170))
    band = "" if len(runs) > 1 else " The green band holds 95% of batches under random order."
    st.caption(
        "Look for waves in the batch means: short and easy batches first, long and hard ones later, are the price of "
        f"greed.{band} And for a tail to the right in the ages: items trained on long after the weights that sampled "
        f"them. {mixture.note}"
    )


def machines(runs: Runs) -> None:
    for place, (name, records) in zip(st.columns(len(runs)), runs.items(), strict=True):
        with place:
            of = f": {name}" if len(runs) > 1 else ""
            drawn = charts.lines(
                frames.busy(records), "t", "busy", (f"Busy shares{of}", charts.SECONDS, "busy"), by="who"
            )
            chart(drawn, "Look for the lower line: whoever is idle waits for the other, the higher one is short.")
            instances = frames.instances(records)
            if not instances:
                st.info(f"{name}: no instance told yet how busy it was.")
                continue
            down = frames.downs(records)
            chart(
                charts.heat(instances, "busy", f"Busy share of every instance{of}", "busy", down),
                "Look for pale stripes: an instance that is down, or starved by the router while others are full.",
                instances,
            )
            if any(instances.columns["requests"]):
                chart(
                    charts.heat(instances, "requests", f"Requests under way at every instance{of}", "requests", down),
                    "Look for one dark row among pale ones: the router piles onto it.",
                )
    parts = _together(runs, frames.parts)
    if parts:
        drawn = charts.bars(parts, "part", "seconds", ("Seconds of each part", "", "summed over instances"), BLUE)
        chart(drawn, "Look for the part that grows: rollout is summed over instances, the others are the trainer's.")


def serving(runs: Runs) -> None:
    ttft = _together(runs, lambda records: frames.distribution(records.run.ttft_s))
    tpot = _together(runs, lambda records: frames.distribution(records.run.tpot_s))
    left, right = st.columns(2)
    for place, frame, title in ((left, ttft, "Time to first token"), (right, tpot, "Time per output token")):
        with place:
            if frame:
                tail = "Look for a long tail to the right: requests that queued, or were prefilled behind others."
                chart(charts.distribution(frame, title), tail)
            else:
                st.info(f"{title}: none was measured.")
    tiers, cached = _together(runs, frames.tiers), _together(runs, frames.cached)
    left, right = st.columns(2)
    with left:
        if tiers:
            chart(
                charts.stacked_shares(tiers, "Prompt tokens by where they were found", 60 + 40 * len(runs)),
                "Look for grey: prompt tokens that had to be computed although a tier might have held them.",
            )
        else:
            st.info("Nobody counted prompt tokens found in KV: the trace has no such counters.")
    with right:
        if cached:
            by = "run" if "run" in cached.columns else ""
            titles = ("Prompt tokens the router believed cached", charts.SECONDS, "share")
            chart(charts.lines(cached, "t", "share", titles, by=by), "Look for dips: weights that change empty the KV.")


def reward(runs: Runs) -> None:
    found = _together(runs, frames.reward)
    if found:
        chart(
            charts.reward(found),
            "Look for a rise that held-out tasks share: dots are sampled batches, diamonds tasks never trained on.",
            found,
        )


def _together(runs: Runs, of: Callable[[Records], Frame]) -> Frame:
    """One frame of all runs; with a column that names them where there are several."""
    made = {name: of(records) for name, records in runs.items()}
    return frames.side_by_side(made) if len(made) > 1 else next(iter(made.values()))
