"""A killed life may end between any two events; its trace replays all the same."""

from __future__ import annotations

from forge import scenario as scenarios
from forge import trace as ev
from forge.replay import replay_driver, replay_policies
from sim.world import simulate


def test_every_prefix_of_a_trace_replays() -> None:
    small = ["stop={items=4}", "queue={n=2,batch=1,concurrency=2,group=2}"]
    scenario = scenarios.load("quickstart", small)
    events: list[ev.Event] = []
    simulate(scenario, (events.append,))
    calls = [i for i, e in enumerate(events) if isinstance(e, ev.PolicyCall)]
    for end in [*calls, len(events) - 1]:
        for replayed in (replay_policies, replay_driver):
            result = replayed(events[: end + 1], scenario)
            assert result.is_same, (events[end], result.difference)
            assert result.events == end + 1


def test_a_life_cut_between_a_decision_and_its_act_replays() -> None:
    small = ["stop={items=4}", "queue={n=2,batch=1,concurrency=2,group=2}"]
    scenario = scenarios.load("quickstart", small)
    events: list[ev.Event] = []
    simulate(scenario, (events.append,))
    at = next(i for i, e in enumerate(events) if isinstance(e, ev.PolicyCall) and e.slot == "router")
    cut = [*events[: at + 1], ev.RolledBack(t=events[at].t, positions=())]
    result = replay_driver(cut, scenario)
    assert result.is_same, result.difference
    assert result.events == len(cut)
