"""Trace: a recorded workload served by simulated instances under two routers, side by side."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path

import streamlit as st

from dashboards import charts, comparison, controls, frames, serving, table, uploads
from dashboards.controls import Changes
from dashboards.serving import Fleet, Served
from dashboards.ui import chart, complain, html, opening, runs_root, told, widget, widgets
from forge.types import ForgeError
from sim.traces.reading import Recorded

SIDES = {"A": "least_loaded", "B": "cache_aware"}
SOURCES = ("an uploaded file", "a path on this machine", "a run folder")
_ONE = threading.Lock()


@st.cache_resource(max_entries=6, show_spinner="Reading the trace…")
def _workload(path: str, changed_s: float) -> Recorded:  # noqa: ARG001 - a file that changed is another trace
    return uploads.workload(Path(path))


@st.cache_resource(max_entries=24, show_spinner=False)
def _served(path: str, changed_s: float, requests: int, fleet: Fleet, kind: str, values: str) -> Served:
    trace, _ = serving.cut(_workload(path, changed_s), requests)
    with _ONE:
        return serving.serve(trace, fleet, serving.router(kind, json.loads(values)))


def page() -> None:
    opening(
        "Trace",
        "Look at the time to first token: the router that finds more prompts cached wins only while it does not pile "
        "them onto one instance.",
    )
    found = _source()
    if found is None:
        return
    path, name = found
    try:
        with uploads.called(path, name):
            changed_s = path.stat().st_mtime
            trace = _workload(str(path), changed_s)
    except ForgeError as error:
        complain(error)
        return
    requests, fleet = _fleet()
    _, note = serving.cut(trace, requests)
    served: dict[str, Served] = {}
    for place, (side, kind) in zip(st.columns(2), SIDES.items(), strict=True):
        with place, st.container(border=True):
            asked = _router(side, kind, fleet)
            with told(f"Router {side}"), st.spinner("Serving…"):
                name_of = f"{side}: {asked.kind}"
                served[name_of] = _served(str(path), changed_s, requests, fleet, asked.kind, json.dumps(asked.values))
    if served:
        seconds = sum(one.seconds for one in served.values())
        st.info(f"{note} Serving took {seconds:.2f} s.".strip())
        _show(served)


# --- what is served ------


def _source() -> tuple[Path, str] | None:
    """The trace's path, and what a person calls it."""
    with st.sidebar:
        source = st.radio("Workload", SOURCES, key="workload")
        if source == SOURCES[0]:
            file = st.file_uploader("Mooncake, Azure, Claude Code, or trace.jsonl of a run", key="workload-file")
            found = None if file is None else (uploads.kept(file.getvalue(), file.name), file.name)
        elif source == SOURCES[1]:
            given = st.text_input("File or folder", key="workload-path").strip()
            found = (Path(given).expanduser(), given) if given else None
        else:
            runs = [one for one in uploads.runs_in(runs_root()) if one.state != "no trace"]
            chosen = st.selectbox("Run", [one.name for one in runs], key="workload-run")
            found = next(((one.path, one.name) for one in runs if one.name == chosen), None)
    if found is None:
        st.info(
            "Choose a recorded workload on the left: a Mooncake trace (JSON lines), an Azure LLM trace (CSV), Claude "
            "Code sessions, or a run."
        )
        return None
    if not found[0].exists():
        complain(ForgeError(f"{found[1]}: no such file or folder on the machine that runs the dashboard"))
        return None
    return found


def _fleet() -> tuple[int, Fleet]:
    """How many requests, and the instances that serve them."""
    default = Fleet()
    with st.sidebar:
        requests = int(st.number_input("Requests at most", 1, None, serving.REQUESTS, 500, key="requests"))
        instances = int(st.number_input("Instances", 1, 256, default.instances, 1, key="instances"))
        concurrency = int(
            st.number_input(
                "Sessions under way at a time",
                0,
                None,
                0,
                8,
                key="concurrency",
                help="0: sessions come when they were recorded.",
            )
        )
        speed = float(
            st.number_input("Recorded arrivals, times as fast", 0.01, 1000.0, 1.0, 0.5, format="%g", key="speed")
        )
        with st.expander("What an instance is"):
            models, cards = controls.model_names(), controls.hardware_names()
            model = st.selectbox("Model", models, models.index(default.model), key="model")
            on = st.selectbox("Hardware", cards, cards.index(default.hardware), key="hardware")
            tp = int(st.number_input("Tensor parallel", 1, 64, default.tp, 1, key="tp"))
            budget = int(st.number_input("Tokens an iteration", 257, None, default.budget, 1024, key="budget"))
            period_s = float(
                st.number_input("Reports every (s)", 0.0, None, default.period_s, 0.5, format="%g", key="period")
            )
    return requests, Fleet(
        model=model,
        hardware=on,
        tp=tp,
        instances=instances,
        budget=budget,
        speed=speed,
        concurrency=concurrency,
        period_s=period_s,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    kind: str
    values: Changes


def _router(side: str, kind: str, fleet: Fleet) -> Asked:
    st.markdown(f"**Router {side}**")
    chosen = str(widget(controls.kind_control("router"), kind, f"{side}:router"))
    own: Changes = {}
    with told():
        own = serving.defaults(chosen, fleet)
    fields = [(one, own.get(one.name, one.default)) for one in controls.fields_controls("router", chosen)]
    values = widgets(fields, f"{side}:{chosen}:{fleet.model}:{fleet.hardware}:{fleet.tp}:{fleet.budget}", 3)
    return Asked(chosen, {path.rpartition(".")[2]: value for path, value in values.items()})


# --- what came of it ------


def _show(served: dict[str, Served]) -> None:
    figures = [serving.figures(one) for one in served.values()]
    html(table.figures(comparison.rows(*figures, of=serving.FIGURES), list(served)))
    left, right = st.columns(2)
    for place, key, title in (
        (left, "ttft_s", "Time to first token"),
        (right, "tpot_s", "Time per output token"),
    ):
        with place:
            made = {name: frames.distribution(serving.values(one.rows, key)) for name, one in served.items()}
            chart(
                charts.distribution(frames.side_by_side(made), title),
                "Look for a long tail to the right: requests that queued, or were prefilled behind others.",
            )
    for place, (name, one) in zip(st.columns(len(served)), served.items(), strict=True):
        with place:
            chart(
                charts.heat(
                    serving.loads(one), "requests", f"Requests under way at every instance: {name}", "requests"
                ),
                "Look for one dark row among pale ones: the router piles onto it.",
            )
    hits = frames.side_by_side({name: serving.hits(one.rows) for name, one in served.items()})
    titles = ("Prompt tokens found cached", "seconds of the trace", "share")
    chart(
        charts.lines(hits, "t", "share", titles, by="run"), "Look for lines apart: one router knows where prefixes are."
    )
