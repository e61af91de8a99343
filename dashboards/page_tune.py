"""Tune: `forge tune` in the background, its progress, what can be traded for what, and the policy to download."""

from __future__ import annotations

import os
import time
from pathlib import Path

import streamlit as st

from dashboards import charts, jobs, table, uploads
from dashboards.jobs import Ask, Job
from dashboards.ui import complain, html, opening, runs_root, show, told
from forge import scenario as scenarios
from forge.report.page import number
from forge.scenario import Scenario
from forge.types import ForgeError
from sim.choose import OBJECTIVES, SPEED

REFRESH_S = 2.0
UPLOADED = "an uploaded file"
EXAMPLE = "policy.scheduler.fraction=0.1..0.9\nqueue.concurrency=16,24,32"


def page() -> None:
    opening(
        "Tune",
        "Look at the gain on held-out seeds: only where its interval lies clear of zero is the tuned policy better, "
        "and only then is it adopted.",
    )
    _ask()
    found = jobs.jobs(runs_root())
    if not found:
        return
    st.divider()
    names = [job.path.name for job in found]
    chosen = st.selectbox("Tuning, newest first", names, key="job")
    job = found[names.index(chosen)]
    if job.state() == "running":
        st.fragment(_progress, run_every=REFRESH_S)(job)
    else:
        with told():
            _outcome(job)


# --- a new one ------


def _ask() -> None:
    with st.sidebar:
        name = st.selectbox("Scenario", [*uploads.shipped(), UPLOADED], key="tune-scenario")
        file = st.file_uploader("A scenario in TOML", key="tune-file") if name == UPLOADED else None
        seeds = int(st.number_input("Seeds, half of them held out", 4, 100, 6, 2, key="seeds"))
        steps = int(st.number_input("Trainer steps of a run (0: whole runs)", 0, None, 20, 5, key="steps"))
        trials = int(st.number_input("Points at most (0: all of a small space, else 60)", 0, None, 0, 10, key="trials"))
        cores = os.cpu_count() or 1
        workers = int(st.number_input("Processes", 1, 4 * cores, max(1, cores - 1), 1, key="workers"))
    params = st.text_area(
        "What may vary, one key a line; empty: window, N and concurrency under the lag budget",
        key="params",
        placeholder=EXAMPLE,
        help="A range such as 0.1..0.9, or choices such as 2,4,8, of any field of a policy, queue.n, "
        "queue.concurrency, engine.instances and slots.",
    )
    if name == UPLOADED and file is None:
        st.info("Upload a scenario on the left.")
        return
    try:
        scenario = _scenario(name, None if file is None else (file.getvalue(), file.name))
        lines = tuple(line.strip() for line in params.splitlines() if line.strip())
        ask = Ask(scenario=scenario, params=lines, seeds=seeds, steps=steps, trials=trials or None, workers=workers)
        _, most = jobs.plan(ask)
    except ForgeError as error:
        complain(error)
        return
    if st.button(f"Tune {scenario.name}: at most {most:,} simulated runs", type="primary", key="start"):
        with told():
            st.session_state["job"] = jobs.start(ask, runs_root()).path.name


def _scenario(name: str, upload: tuple[bytes, str] | None) -> Scenario:
    return scenarios.load(name, tuning=True) if upload is None else uploads.scenario_from(*upload)


# --- one under way ------


def _progress(job: Job) -> None:
    if job.state() != "running":
        st.rerun()
    about = job.about()
    made, most = job.runs_made(), int(about.get("most_runs", 1))
    elapsed = time.time() - float(about.get("started_s", time.time()))
    st.progress(
        min(1.0, made / max(1, most)),
        f"{made:,} simulated runs made of at most {most:,}, after {elapsed:.0f} s; what is hopeless is dropped early",
    )
    if st.button("Stop", key="stop"):
        jobs.stop(job)
        time.sleep(0.5)
        st.rerun()


# --- what came of one ------


def _outcome(job: Job) -> None:
    state, result = job.state(), job.result()
    if state == "failed":
        complain(ForgeError(job.complaint()), "Tuning came to nothing")
        return
    if result is None:
        kept = job.runs_made()
        st.warning(f"Stopped with {kept:,} simulated runs made; they are kept.")
        if tail := jobs.log_tail(job):
            st.code(tail, language=None)
        if st.button("Go on", key="go-on"):
            jobs.go_on(job)
            st.rerun()
        return
    st.markdown(f"**{result['held_out']['verdict']}**")
    adopted = jobs.described(result["adopted"]["set"])
    st.markdown(f"Adopted: `{adopted}`. By J: {result['best_by_j_reason']}.")
    _gains(result)
    found = jobs.front(result)
    others = [key for key in OBJECTIVES if key != SPEED]
    for place, key in zip(st.columns(len(others)), others, strict=True):
        with place:
            show(charts.front(found, key, OBJECTIVES[key][0].partition(" (1")[0], SPEED, OBJECTIVES[SPEED][0]))
    st.caption(
        f"Look for the upper left edge: {len(result['candidates']):,} candidates, means over the seeds that each was "
        f"run on; a point of the edge buys speed with what is to its right."
    )
    _downloads(job)


def _gains(result: dict[str, object]) -> None:
    rows = [[label, number(own), number(chosen), jobs.bounds(gain)] for label, own, chosen, gain in jobs.gains(result)]
    if rows:
        html(table.plain(["On seeds the choice never saw", "its own policy", "chosen", "gain [95%]"], rows))


def _downloads(job: Job) -> None:
    files = [("policy.toml", "application/toml"), ("tune.md", "text/markdown"), ("tune.json", "application/json")]
    there = [(job.path / name, kind) for name, kind in files if (job.path / name).is_file()]
    for place, (path, kind) in zip(st.columns(max(3, len(there))), there, strict=False):
        with place:
            st.download_button(f"Download {path.name}", _text(path), path.name, kind, key=f"get-{path.name}")
    st.caption("Deploy it with `forge run SCENARIO --policy policy.toml`.")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
