"""Records of a run on a page: folded while it is written, shared by tabs, never fooled by a broken file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import worlds

from dashboards.frames import SPANS, Frame, busy, default_range, distribution, queue_window, side_by_side, thinned
from dashboards.records import Flights, Follower, Records, held, in_flight
from forge import trace as ev
from forge.metrics import summarise
from forge.scenario import Scenario
from forge.types import ForgeError


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return worlds.scenario()


@pytest.fixture(scope="module")
def events(scenario: Scenario) -> list[ev.Event]:
    seen: list[ev.Event] = []
    worlds.World(scenario, sinks=(seen.append,), crashes=(30.0,)).run()
    return seen


def lines(events: list[ev.Event]) -> str:
    return "".join(ev.encode(event) + "\n" for event in events)


def test_a_growing_trace_folds_to_what_the_whole_one_does(
    tmp_path: Path, scenario: Scenario, events: list[ev.Event]
) -> None:
    """Written in pieces that end anywhere, also within a line."""
    text, path = lines(events), tmp_path / "trace.jsonl"
    follower = Follower(path, scenario)
    with follower.held() as records:
        assert records.events == 0, "no file yet"
    for end in (1, 200, 5000, len(text) // 2, len(text) - 3, len(text)):
        path.write_text(text[:end], encoding="utf-8")
        with follower.held() as records:
            whole = text[:end].count("\n")
            assert records.events == whole
    assert records.summary() == summarise(events, scenario)


def test_a_file_that_shrank_is_read_from_its_beginning(
    tmp_path: Path, scenario: Scenario, events: list[ev.Event]
) -> None:
    path = tmp_path / "trace.jsonl"
    follower = Follower(path, scenario)
    for count in (400, 30):
        path.write_text(lines(events[:count]), encoding="utf-8")
        with follower.held() as records:
            assert records.events == count


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("\0\1\2 binary", "not a trace event"),
        ('{"t":1.0,"e":"dance"}', "not a trace event"),
        ('{"t":"x","e":"submitted","position":0,"domain":"a","difficulty":1,"members":1}', "fits no run"),
        ('{"t":1.0,"e":"usage","busy_s":3,"steps":1,"prefill_tokens":1,"decode_tokens":1}', "fits no run"),
    ],
)
def test_a_broken_line_is_named(
    tmp_path: Path, scenario: Scenario, events: list[ev.Event], line: str, complaint: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(lines(events[:10]) + line + "\n", encoding="utf-8")
    follower = Follower(path, scenario)
    for _ in range(2):  # the next tab is told as well
        with pytest.raises(ForgeError, match=complaint) as raised, follower.held():
            pass
        assert "trace.jsonl:11" in str(raised.value)


def test_two_followers_are_held_in_one_order(tmp_path: Path, scenario: Scenario, events: list[ev.Event]) -> None:
    names = ["b", "a"]
    for name in names:
        (tmp_path / name).write_text(lines(events[:50]), encoding="utf-8")
    with held({name: Follower(tmp_path / name, scenario) for name in names}) as runs:
        assert list(runs) == names


def test_requests_in_flight_are_counted_where_they_are(events: list[ev.Event]) -> None:
    """Against a count event by event."""
    flights = Flights()
    at: dict[str, int] = {}
    for event in events:
        flights.apply(event)
        match event:
            case ev.Routed():
                at[event.request] = event.instance
            case ev.Completed():
                at.pop(event.request, None)
            case ev.Resumed():
                at.clear()
        counted = [sum(instance == i for instance in at.values()) for i in range(2)]
        assert in_flight(flights, 2, np.array([event.t]))[:, 0].tolist() == counted


@pytest.fixture(scope="module")
def records(scenario: Scenario, events: list[ev.Event]) -> Records:
    found = Records(scenario)
    for event in events:
        found.apply(event)
    return found


def test_the_queue_window_shows_what_happened(records: Records) -> None:
    wall_s = records.wall_s
    window = queue_window(records, 0.0, wall_s)
    spans = window.spans.columns
    assert not window.spans.note
    assert set(spans["position"]) == set(records.run.items)
    taken = sum(what == "taken" for what in window.marks.columns["what"])
    assert taken == sum(item.taken_s is not None for item in records.run.items.values())
    edges = window.edges.columns
    head = [p for p, edge in zip(edges["position"], edges["edge"], strict=True) if edge == "head"]
    end = [p for p, edge in zip(edges["position"], edges["edge"], strict=True) if edge != "head"]
    assert {round(b - a) for a, b in zip(head, end, strict=True)} == {records.window}
    low, high = wall_s / 3, wall_s / 2
    some = queue_window(records, low, high).spans.columns
    assert min(some["start"]) >= low
    assert max(some["end"]) <= high


def test_what_is_left_out_is_said(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboards.frames.SPANS", 20)
    window = queue_window(records, 0.0, records.wall_s)
    assert "Drawn is every" in window.spans.note
    assert len(window.spans.columns["position"]) <= SPANS
    kept, note = thinned(range(10_000), 100, "dots")
    assert (kept[0], kept[-1], len(kept)) == (0, 9999, 100)
    assert note == "Drawn are 100 of 10,000 dots, evenly spaced."
    assert thinned(range(5), 100, "dots") == ([0, 1, 2, 3, 4], "")


def test_the_range_shown_first_lies_in_the_run(records: Records) -> None:
    for newest in (True, False):
        low, high = default_range(records, newest=newest)
        assert 0.0 <= low < high <= records.wall_s


def test_busy_shares_are_shares(records: Records) -> None:
    shares = busy(records).columns["busy"]
    assert 0.0 <= min(shares) <= max(shares) <= 1.0


def test_a_distribution_ends_at_one() -> None:
    frame = distribution([3.0, 1.0, 2.0])
    assert list(frame.columns["seconds"]) == [1.0, 2.0, 3.0]
    assert list(frame.columns["share"])[-1] == 1.0
    assert not distribution([])


def test_frames_of_several_runs_keep_their_names() -> None:
    both = side_by_side({"a": Frame({"x": [1, 2]}, "less."), "b": Frame({"x": []}), "c": Frame({"x": [3]}, "less.")})
    assert both.columns == {"x": [1, 2, 3], "run": ["a", "a", "c"]}
    assert both.note == "less."
    assert not side_by_side({"a": Frame({"t": []})})
