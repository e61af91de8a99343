"""Run: one run folder, live, ended or killed, or an uploaded trace; alone or beside a second one."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from pathlib import Path

import streamlit as st

from dashboards import comparison, pictures, table, uploads
from dashboards.records import Follower, Records, held
from dashboards.ui import html, opening, runs_root, told
from dashboards.uploads import Listed
from forge.runs import RunFolder
from forge.scenario import Scenario, parse, resolved
from forge.types import ForgeError

REFRESH_S = 3.0
NOBODY = "none"
GOING_ON = ("begins", "live")


@st.cache_resource(max_entries=12, show_spinner=False)
def _follower(path: str, inode: int, scenario: str) -> Follower:  # noqa: ARG001 - a new file is another trace
    return Follower(Path(path), parse(json.loads(scenario), path))


def follow(trace: Path, scenario: Scenario) -> Follower:
    """One for all tabs."""
    inode = trace.stat().st_ino if trace.exists() else 0
    return _follower(str(trace), inode, json.dumps(resolved(scenario)))


def page() -> None:
    opening(
        "Run",
        "Look at the queue window first: orange is finished work held back, and whoever is idle further down waits for "
        "what holds it.",
    )
    with st.sidebar:
        source = st.radio("Source", ["a run folder", "an uploaded trace"], key="run-source")
    if source == "an uploaded trace":
        _uploaded()
        return
    runs = uploads.runs_in(runs_root())
    if not runs:
        st.info(f"No run folder under {runs_root()}/ yet: `forge sim quickstart` makes one in a few seconds.")
        return
    with st.sidebar:
        names = [one.name for one in runs]
        labels = {one.name: one.label() for one in runs}
        chosen = st.selectbox("Run, newest first", names, format_func=labels.get, key="run")
        second = st.selectbox("Beside it", [NOBODY, *names], format_func=lambda n: labels.get(n, n), key="second")
    by_name = {one.name: one for one in runs}
    picked = [by_name[chosen]] + ([by_name[second]] if second not in (NOBODY, chosen) else [])
    if any(one.state in GOING_ON for one in picked):
        st.fragment(_show, run_every=REFRESH_S)(picked)
    else:
        _show(picked)


def _show(picked: list[Listed]) -> None:
    """Of one or two runs; again and again while one of them is live."""
    now = [uploads.listed(one.path, runs_root()) for one in picked]
    if any(a.state in GOING_ON and b.state not in GOING_ON for a, b in zip(picked, now, strict=True)):
        st.rerun()
    names = [f"run {side}" for side in "AB"] if len(now) > 1 else ["run"]
    for name, one in zip(names, now, strict=False):
        _headline(name if len(now) > 1 else "", one)
    began = time.monotonic()
    followers: dict[str, Follower] = {}
    for name, one in zip(names, now, strict=False):
        with told(one.name):
            run = RunFolder.open(one.path)
            if one.state == "no trace":
                _figures_only(run)
            elif one.state != "begins":
                followers[name] = follow(run.trace, run.scenario())
    _pictures(followers, newest=any(one.state == "live" for one in now), began=began)


def _headline(name: str, one: Listed) -> None:
    words = {
        "begins": ":green[● begins]: its engines start, and the starting model is evaluated; this page follows it",
        "live": ":green[● live]: this page follows it",
        "ended": "ended",
        "stopped": "its trace has no end: the run was killed, or has stood still for half a minute",
        "no trace": "no trace was kept: figures alone",
    }
    st.markdown(f"{name} `{one.name}` {words[one.state]}")


def _pictures(followers: dict[str, Follower], *, newest: bool, began: float) -> None:
    """Read what is new, then draw under the locks, since other tabs read the same runs."""
    if not followers:
        return
    with told(), ExitStack() as stack:
        with st.spinner("Reading…"):
            runs = stack.enter_context(held(followers))
        _draw(runs, newest=newest, began=began)


def _draw(runs: dict[str, Records], *, newest: bool, began: float) -> None:
    if not all(records.run.items for records in runs.values()):
        st.info("Nothing has been submitted yet.")
        return
    events = sum(records.events for records in runs.values())
    st.caption(f"{events:,} events, read in {time.monotonic() - began:.2f} s.")
    pictures.sections(runs, "run-range:" + ":".join(runs), newest=newest)


def _figures_only(run: RunFolder) -> None:
    summary = run.read("summary.json")
    if summary is None:
        raise ForgeError("neither trace.jsonl nor summary.json: the run was stopped before its first event")
    html(table.figures(comparison.rows(summary), [run.path.name]))
    for picture in ("queue.png", "lag.png", "busy.png", "instances.png", "latency.png", "mixture.png"):
        if (run.path / picture).is_file():
            st.image(str(run.path / picture))


# --- uploads ------


def _uploaded() -> None:
    with st.sidebar:
        trace = st.file_uploader("trace.jsonl", key="trace-file")
        resolved = st.file_uploader("Its scenario.resolved.json (not needed for scenarios that ship)", key="trace-of")
    if trace is None:
        st.info("Upload the trace.jsonl of any run on the left.")
        return
    with told():
        path = uploads.kept(trace.getvalue(), trace.name)
        if resolved is None:
            scenario = uploads.scenario_of_trace(path, trace.name)
            st.info(
                f"N, the window and the fleet are those of {scenario.name!r} as it ships; where the run had others, "
                f"upload its scenario.resolved.json too."
            )
        else:
            scenario = uploads.resolved_scenario(resolved.getvalue(), resolved.name)
        with uploads.called(path, trace.name):
            _pictures({"run": follow(path, scenario)}, newest=False, began=time.monotonic())
