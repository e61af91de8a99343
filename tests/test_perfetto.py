"""The exported timeline against the rules of the trace-event format, and against the trace it tells of."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_metrics import story
from worlds import scenario, trace_of

from forge import trace as ev
from forge.report.perfetto import INSTANCES, QUEUE, TRAINER, trace_events, write_perfetto

Row = dict[str, Any]


def exported(events: list[ev.Event], folder: Path) -> list[Row]:
    data = json.loads(write_perfetto(iter(events), folder / "t.json").read_text())
    assert [p.name for p in folder.iterdir()] == ["t.json"]
    assert data["displayTimeUnit"] == "ms"
    rows: list[Row] = data["traceEvents"]
    return rows


def obeys_the_format(rows: list[Row], wall_s: float) -> None:
    """Phases known, times and ids given, slices balanced and properly nested, counters numeric, processes named."""
    open_slices: dict[tuple[int, int], list[Row]] = defaultdict(list)
    open_async: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    starts: Counter[int] = Counter()
    named = {(r["pid"], r["tid"]) for r in rows if r["ph"] == "M" and r["name"] == "thread_name"}
    processes = {r["pid"] for r in rows if r["ph"] == "M" and r["name"] == "process_name"}
    last = 0.0
    for row in rows:
        ph, at = row["ph"], (row["pid"], row["tid"])
        assert all(isinstance(n, int) for n in at)
        if ph == "M":
            continue
        assert at in named
        assert row["pid"] in processes
        assert 0 <= row["ts"] <= wall_s * 1e6 + 1e-3, "microseconds of the run"
        if ph == "X":  # written when it ends
            assert row["dur"] >= 0
            assert row["ts"] + row["dur"] <= wall_s * 1e6 + 1e-3
            assert row["name"]
            continue
        assert row["ts"] >= last, "time went back"
        last = row["ts"]
        match ph:
            case "B":
                assert row["name"]
                open_slices[at].append(row)
            case "E":
                assert open_slices[at], f"nothing to end on {at}"
                open_slices[at].pop()
            case "b":
                open_async[(row["pid"], row["cat"], row["id"])].append(row["name"])
            case "e":
                assert open_async[(row["pid"], row["cat"], row["id"])].pop() == row["name"]
            case "C":
                assert row["args"]
                assert all(isinstance(v, int | float) for v in row["args"].values())
                assert row["args"].get("share", 0) >= 0
            case "i":
                assert row["s"] in "gpt"
                assert row["name"]
            case "s":
                assert open_slices[at], "a flow starts inside a slice"
                starts[row["id"]] += 1
            case "f":
                assert open_slices[at], "a flow ends inside a slice"
                assert row["bp"] == "e"
                assert starts[row["id"]] > 0, "a flow ends that never started"
            case _:
                raise AssertionError(f"unknown phase {ph}")
    assert not any(open_slices.values())
    assert not any(open_async.values())


def test_a_story_on_a_time_axis(tmp_path: Path) -> None:
    rows = exported(story(), tmp_path)
    obeys_the_format(rows, 10.0)
    names = {r["pid"]: r["args"]["name"] for r in rows if r["ph"] == "M" and r["name"] == "process_name"}
    assert names == {QUEUE: "queue", TRAINER: "trainer", INSTANCES: "instance 0"}
    request = [(r["ph"], r["name"], r["ts"]) for r in rows if r.get("cat") == "request"]
    assert request == [
        ("b", "request", 1e6),
        ("b", "prefill", 1e6),
        ("e", "prefill", 1.5e6),
        ("b", "decode", 1.5e6),
        ("e", "decode", 2.5e6),
        ("e", "request", 2.5e6),
    ]
    spans = [(r["name"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X" and r["pid"] == TRAINER]
    # The second step has 1 s for parts of 1.5 s: what does not fit is cut at its start.
    assert spans == [
        ("data", 5.5e6, 0.25e6),
        ("train", 5.75e6, 1e6),
        ("save", 6.75e6, 0.25e6),
        ("train", 9e6, 0.75e6),
        ("save", 9.75e6, 0.25e6),
    ]
    heads = [(r["ts"], r["args"]["position"]) for r in rows if r["ph"] == "C" and r["name"] == "head"]
    assert heads == [(3e6, 1), (4e6, 2), (5e6, 3), (8e6, 3), (9e6, 5)]
    counts = [r["args"] for r in rows if r["ph"] == "C" and r["name"] == "items"]
    assert counts[-1] == {"running": 0, "finished": 0}
    assert max(c["running"] for c in counts) == 3
    (dead,) = [r for r in rows if r["ph"] == "i" and r["name"] == "dead"]
    assert (dead["ts"], dead["args"]) == (4e6, {"reason": "timeout"})
    published = [(r["name"], r["ts"]) for r in rows if r["ph"] == "i" and r["name"].startswith("published")]
    assert published == [("published 1", 8e6), ("published 2", 10e6)]


@pytest.mark.parametrize("crashes", [(), (4.0, 9.0)], ids=["one life", "resumed twice"])
def test_a_world_with_crashes_obeys_the_format_and_counts_agree(crashes: tuple[float, ...], tmp_path: Path) -> None:
    events = trace_of(scenario(), seed=3, crashes=crashes)
    rows = exported(events, tmp_path)
    obeys_the_format(rows, events[-1].t)
    kinds = Counter(e.e for e in events)
    requests = [r for r in rows if r["ph"] == "b" and r["name"] == "request"]
    assert len(requests) == kinds["routed"]
    steps = [r for r in rows if r["ph"] == "B" and r["pid"] == TRAINER]
    assert len(steps) == kinds["step_started"]
    flows = Counter(r["ph"] for r in rows if r.get("name") == "trained on")
    assert flows["s"] == kinds["taken"]
    assert flows["f"] == sum(len(e.positions) for e in events if isinstance(e, ev.StepStarted))
    finishes = Counter(r["args"]["finish"] for r in rows if r["ph"] == "e" and r["name"] == "request")
    assert finishes["unknown"] == kinds["routed"] - kinds["completed"]
    head = [r["args"]["position"] for r in rows if r["ph"] == "C" and r["name"] == "head"]
    assert head[-1] == len({e.position for e in events if isinstance(e, ev.Submitted)})
    in_flight = [r["args"]["requests"] for r in rows if r["ph"] == "C" and r["name"] == "requests in flight"]
    assert min(in_flight) == 0
    assert max(in_flight) > 1, "requests overlap"


@settings(max_examples=20, deadline=None, derandomize=True)
@given(share=st.floats(0, 1), seed=st.integers(0, 50), crash=st.sampled_from([(), (3.0,)]))
def test_a_killed_run_is_closed_at_its_last_event(share: float, seed: int, crash: tuple[float, ...]) -> None:
    events = trace_of(scenario(stop={"items": 20}), seed=seed, crashes=crash)
    cut = events[: max(1, int(share * len(events)))]
    obeys_the_format(list(trace_events(cut)), cut[-1].t)
