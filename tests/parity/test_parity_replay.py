"""Replay: every traced decision follows from the trace, in both worlds, and any tampering is found where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import World, scenario, trace_of

from forge import trace as ev
from forge.metrics import summarise
from forge.replay import replay, replay_driver, replay_policies
from forge.runs import RunFolder
from forge.scenario import Scenario
from forge.trace import TraceWriter
from forge.types import ForgeError

#: what parks items: early enough for the toy world's seconds, few positions, so that some die stale
ESCAPE = "windowed_fifo with escape"
SCHEDULERS = ["windowed_fifo", "strict_fifo", "greedy", "fffo", "adaptive_window", ESCAPE]


def ruled(scheduler: str = "windowed_fifo", router: str = "least_loaded", **over: object) -> Scenario:
    chosen: dict[str, object] = {"kind": scheduler}
    if scheduler == ESCAPE:
        chosen = {"kind": "windowed_fifo", "park_items": 2, "park_after_s": 0.3, "park_reach": 4}
    return scenario(policy={"scheduler": chosen, "router": {"kind": router}}, **over)


def reread(events: list[ev.Event]) -> list[ev.Event]:
    return [ev.decode(ev.encode(e)) for e in events]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("router", ["least_loaded", "round_robin"])
def test_every_policy_and_several_lives_replay(scheduler: str, router: str) -> None:
    given_scenario = ruled(scheduler, router)
    events = reread(trace_of(given_scenario, mtbf_s=6.0, crashes=(4.0, 9.0)))
    calls = sum(isinstance(e, ev.PolicyCall) for e in events)
    for result in (replay_policies(events, given_scenario), replay_driver(events, given_scenario)):
        assert result.is_same, result.difference
        assert (result.events, result.calls, result.lives) == (len(events), calls, 3)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_simulators_trace_replays_and_keeps_the_laws(scheduler: str) -> None:
    world = pytest.importorskip("sim.world")
    given_scenario = ruled(
        scheduler, sim={"domains": {"agent": {"death_rate": 0.2}}, "instance_mtbf_s": 3.0, "instance_repair_s": 0.5}
    )
    events: list[ev.Event] = []
    world.simulate(given_scenario, sinks=(events.append,))
    assert replay_policies(reread(events), given_scenario).is_same
    assert replay_driver(reread(events), given_scenario).is_same
    assert summarise(events, given_scenario)["law_violations"] == []


DISPATCHES = [
    {"kind": "mix", "refuse_above": 1, "retry_after_s": 0.3},
    {"kind": "stages", "round_items": 9},
    {"kind": "replace_dead"},
    {"kind": "paced", "fewest": 2, "unanswered": 0.5, "settle_s": 0.4},
]


@pytest.mark.parametrize("dispatch", DISPATCHES, ids=lambda one: one["kind"])
def test_dispatch_replays_in_both_worlds_and_over_lives(dispatch: dict[str, object]) -> None:
    world = pytest.importorskip("sim.world")
    given_scenario = scenario(policy={"dispatch": dispatch})
    simulated: list[ev.Event] = []
    world.simulate(given_scenario, sinks=(simulated.append,))
    for events in (trace_of(given_scenario, mtbf_s=6.0, crashes=(4.0, 9.0)), simulated):
        assert replay_policies(reread(events), given_scenario).difference is None
        assert replay_driver(reread(events), given_scenario).difference is None
        assert summarise(events, given_scenario)["law_violations"] == []
        refused = sum(isinstance(e, ev.Refused) for e in events)
        assert summarise(events, given_scenario)["refused"] == refused
        assert bool(refused) == ("refuse_above" in dispatch)


@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), scheduler=st.sampled_from(SCHEDULERS), crash=st.floats(0.1, 15))
def test_any_world_replays(seed: int, scheduler: str, crash: float) -> None:
    given_scenario = ruled(scheduler, seed=seed)
    events = trace_of(given_scenario, seed=seed, mtbf_s=5.0, crashes=(crash,))
    assert replay_policies(events, given_scenario).difference is None
    assert replay_driver(events, given_scenario).difference is None


def test_parked_items_replay_and_keep_the_laws_over_lives_in_which_some_die_stale() -> None:
    given_scenario = ruled(ESCAPE, stop={"items": 200})
    first = next(e.t for e in trace_of(given_scenario) if isinstance(e, ev.Parked))
    events = reread(trace_of(given_scenario, crashes=(first + 1e-6, 8.0)))
    assert replay_policies(events, given_scenario).is_same
    assert replay_driver(events, given_scenario).is_same
    summary = summarise(events, given_scenario)
    assert summary["law_violations"] == []
    assert summary["items_parked"] > summary["dead"]["stale"] > 0
    assert any(isinstance(e, ev.Resumed) and e.queue["parked"] for e in events)


# --- controls: each kind of lie is found at its event ------


def at_call(events: list[ev.Event], slot: str) -> int:
    """A call late enough for state to have gathered, and with a decision."""
    calls = [
        i for i, e in enumerate(events) if isinstance(e, ev.PolicyCall) and e.slot == slot and e.decision is not None
    ]
    return calls[len(calls) // 2]


@pytest.mark.parametrize("slot", ["scheduler", "router", "sync"])
@pytest.mark.parametrize(
    ("change", "what"),
    [({"draw": 0.123}, "draw"), ({"view": 1}, "view"), ({"decision": "x"}, "decision")],
)
def test_a_changed_call_is_found(slot: str, change: dict[str, object], what: str) -> None:
    given_scenario = ruled()
    events = trace_of(given_scenario)
    at = at_call(events, slot)
    call = events[at]
    assert isinstance(call, ev.PolicyCall)
    events[at] = replace(call, **change)  # type: ignore[arg-type]
    found = replay_policies(events, given_scenario).difference
    assert found is not None
    assert (found.event, found.what) == (at + 1, f"{what} of {slot}.{call.method}")
    assert str(next(iter(change.values()))) in found.traced
    driver = replay_driver(events, given_scenario).difference
    assert driver is not None
    assert driver.event == at + 1


def test_another_policy_is_found_at_its_first_other_decision() -> None:
    events = trace_of(ruled("greedy"))
    found = replay_policies(events, ruled("strict_fifo")).difference
    assert found is not None
    call = events[found.event - 1]
    assert isinstance(call, ev.PolicyCall)
    assert call.slot == "scheduler"


@pytest.mark.parametrize(
    "kind", [ev.Taken, ev.Parked, ev.Submitted, ev.Finished, ev.Routed, ev.Committed, ev.Published]
)
def test_a_missing_event_is_found(kind: type[ev.Event]) -> None:
    given_scenario = ruled(ESCAPE)
    events = trace_of(given_scenario)
    places = [i for i, e in enumerate(events) if isinstance(e, kind)]
    del events[places[len(places) // 2]]
    assert not replay_policies(events, given_scenario).is_same
    assert not replay_driver(events, given_scenario).is_same


def test_a_missing_policy_call_is_found_by_the_driver() -> None:
    given_scenario = ruled()
    events = trace_of(given_scenario)
    at = at_call(events, "scheduler")
    del events[at]
    found = replay_driver(events, given_scenario).difference
    assert found is not None
    assert found.event == at + 1


def test_an_illegal_event_is_named() -> None:
    given_scenario = ruled()
    events = trace_of(given_scenario)
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.Finished))
    events.insert(at, events[at])
    found = replay_policies(events, given_scenario).difference
    assert found is not None
    assert found.event == at + 2
    assert "finished is illegal here" in str(found)


def test_another_seed_is_another_run() -> None:
    found = replay_policies(trace_of(ruled()), ruled(seed=2)).difference
    assert found is not None
    assert found.what == "seed"


# --- folders ------


def test_a_run_folder_replays(tmp_path: Path) -> None:
    given_scenario = ruled()
    folder = RunFolder.create(tmp_path, given_scenario)
    writer = TraceWriter(folder.trace)
    World(given_scenario, sinks=(writer,), crashes=(5.0,)).run()
    writer.close()
    assert replay(folder).is_same
    assert replay(tmp_path / "latest").lives == 2
    with folder.trace.open("a") as file:
        file.write('{"t": 99, "e": "torn')
    assert replay(folder).is_same, "a line torn by kill -9 is no difference"


def test_a_folder_without_a_trace_is_one_clear_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, ruled())
    with pytest.raises(ForgeError, match=r"no trace here"):
        replay(folder)
    folder.trace.write_text("")
    with pytest.raises(ForgeError, match="empty"):
        replay(folder)
