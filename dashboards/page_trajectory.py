"""Trajectory: what one agent of a live run did, turn by turn, to the token."""

from __future__ import annotations

from pathlib import Path

import altair as alt
import pandas as pd
import streamlit as st

from dashboards import conversations, uploads
from dashboards.charts import SECONDS
from dashboards.conversations import Shown
from dashboards.frames import Frame
from dashboards.ui import chart, html, opening, runs_root, told
from forge.report import trajectories
from forge.report.conversation import Decode
from forge.report.drawing import BLUE, GREY, ORANGE
from forge.report.trajectories import Found
from forge.runs import RunFolder
from forge.types import Json, Trajectory

ITEMS = 50  # newest ones that are listed to begin with
TURNS = 40  # shown of one trajectory
ANY = "any"


@st.cache_resource(max_entries=4, show_spinner="Loading the tokenizer…")
def _decoder(path: str) -> Decode:
    return trajectories.decoder(RunFolder.open(Path(path)))


@st.cache_data(max_entries=8, show_spinner=False)
def _rows(path: str, last: int, changed_ns: int) -> list[Json]:  # noqa: ARG001 - a pool that changed is read again
    with trajectories.reading(RunFolder.open(Path(path))) as pool:
        return trajectories.rows(pool, last)


def _changed_ns(run: RunFolder) -> int:
    """When its pool was written to last: SQLite writes to the log beside it first."""
    return max(path.stat().st_mtime_ns for path in run.path.glob("pool.sqlite*"))


def page() -> None:
    opening(
        "Trajectory",
        "Look at the time line first: long grey is the agent and its tools, long orange a queue or a prefill; then at "
        "the turns where it forks.",
    )
    runs = [one for one in uploads.runs_in(runs_root()) if (one.path / "pool.sqlite").is_file()]
    if not runs:
        st.info(f"No live run under {runs_root()}/: only live runs keep what agents said. `forge run quickstart`.")
        return
    with st.sidebar:
        labels = {one.name: one.label() for one in runs}
        chosen = st.selectbox("Run, newest first", list(labels), format_func=labels.__getitem__, key="trajectory-run")
        last = st.number_input("Newest items", min_value=1, value=ITEMS, step=50, key="trajectory-items")
        outcome = st.selectbox("Outcome", conversations.OUTCOMES, key="trajectory-outcome")
    run = RunFolder.open(next(one.path for one in runs if one.name == chosen))
    with told(chosen):
        rows = _rows(str(run.path), int(last), _changed_ns(run))
        with st.sidebar:
            domains = sorted({row["domain"] for row in rows})
            domain = st.selectbox("Domain", [ANY, *domains], key="trajectory-domain")
        rows = [row for row in rows if conversations.matches(row, outcome, None if domain == ANY else domain)]
        if not rows:
            st.info("No trajectory of this kind among those items.")
            return
        names = {row["trajectory"]: conversations.label(row) for row in rows}
        name = st.selectbox("Trajectory", list(names), format_func=names.__getitem__, key=f"trajectory:{chosen}")
        position, _, member = name.partition(".")
        with trajectories.reading(run) as pool:
            group = trajectories.find(pool, position)
        _show(next(one for one in group.trajectories if one.member == int(member)), group, run)


def _show(one: Trajectory, group: Found, run: RunFolder) -> None:
    st.markdown(f"`{trajectories.headline(group.item, one)}`")
    rewards = [_ended(member) for member in group.trajectories]
    st.caption(f"Its item's members, of which the advantage is made: {', '.join(rewards)}.")
    shown = conversations.in_order(one)
    if not shown:
        st.info("It ended before its first answer.")
        return
    frame = conversations.time_line(shown)
    if frame:
        chart(_time_line(frame, len(shown)), "A turn a line, in the order of the tree.", frame)
    by_version = st.toggle("Colour tokens by the weights that sampled them", key="trajectory-by-version")
    st.caption("Darker tokens were less likely; a token's tip gives its id, logprob and weights version.")
    decode = _decoder(str(run.path))
    for turn in shown[:TURNS]:
        _turn(turn, decode, by_version=by_version)
    if len(shown) > TURNS:
        st.caption(f"{len(shown) - TURNS} more turns: `forge show {run.path.name} {one.position}.{one.member}`.")


def _ended(one: Trajectory) -> str:
    ended = one.outcome
    return f"{one.member}: {ended.reason if ended.reward is None else format(ended.reward, 'g')}"


def _turn(shown: Shown, decode: Decode, *, by_version: bool) -> None:
    with st.expander(conversations.title(shown), expanded=True):
        html(conversations.prompt_html(shown.turn, decode))
        html(conversations.sampled_html(shown.turn.completion, decode, by_version=by_version))


def _time_line(frame: Frame, turns: int) -> alt.Chart:
    data = pd.DataFrame(frame.columns)
    colours = alt.Scale(domain=conversations.PARTS, range=[GREY, ORANGE, BLUE])
    return (
        alt.Chart(data)
        .mark_bar()
        .encode(
            alt.X("start:Q", title=SECONDS.replace("the run", "the trajectory"), scale=alt.Scale(nice=False)),
            alt.X2("end"),
            alt.Y("turn:N", sort=list(dict.fromkeys(frame.columns["turn"])), title=None),
            color=alt.Color("part:N", scale=colours, title=None),
            tooltip=["turn", "part", "start", "end", "what"],
        )
        .properties(title="Time line", height=min(600, 60 + 22 * turns))
    )
