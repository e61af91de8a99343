"""A streamed run says what the events of the same run say, and keeps none of them."""

from __future__ import annotations

from agent_scenarios import agents

from forge.metrics import summarise
from sim.streaming import Progress, stream
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
