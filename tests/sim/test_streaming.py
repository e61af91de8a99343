"""A streamed run says what the events of the same run say, and keeps none of them."""

from __future__ import annotations

from agent_scenarios import agents

from forge import trace as ev
from forge.metrics import summarise
from sim.streaming import CALLS, Progress, stream
from sim.world import simulate


def test_summary_is_that_of_the_events() -> None:
    scenario = agents(items=60, sim={"instance_mtbf_s": 400.0, "instance_repair_s": 20.0, "request_cpu_s": 0.001})
    streamed = stream(scenario)
    assert streamed.summary() == summarise(simulate(scenario).events, scenario)
    assert streamed.calls > 60 * 4


def test_progress_is_told() -> None:
    told: list[Progress] = []
    streamed = stream(agents(items=12), progress=told.append)
    assert (told[-1].items, told[-1].of) == (12, 12)
    assert told[-1].calls == streamed.calls
    assert [one.clock_s for one in told] == sorted(one.clock_s for one in told)


def test_progress_is_told_before_the_first_item_ends() -> None:
    """A campaign's items take half an hour of its clock, and the calls of many minutes of ours come before."""
    told: list[tuple[Progress, int]] = []
    ended = 0

    def count(event: ev.Event) -> None:
        nonlocal ended
        ended += isinstance(event, ev.Finished | ev.Dead)

    stream(agents(items=12), progress=lambda now: told.append((now, ended)), sinks=(count,))
    early = [now for now, before in told if before == 0]
    assert (early[0].items, early[0].calls) == (1, 0)
    assert max(now.calls for now in early) >= 2 * CALLS
    assert max(now.clock_s for now in early) > 0
