"""Dispatch in the simulated world: the work is the same, whoever chooses its order, and pacing keeps memory for it."""

from __future__ import annotations

from typing import Any

from agent_scenarios import agents
from sim_scenarios import build

from forge import trace as ev
from forge.metrics import summarise
from forge.scenario import Scenario
from forge.types import Json
from sim.workload import work_of
from sim.world import simulate


def run(scenario: Scenario) -> tuple[list[ev.Event], Json]:
    events = simulate(scenario).events
    summary = summarise(events, scenario)
    assert summary["law_violations"] == []
    return events, summary


def crowded(**dispatch: Any) -> Scenario:
    """More agents than the memory of two instances holds the contexts of."""
    queue = {"n": 48, "batch": 4, "concurrency": 48}
    return agents(items=80, instances=2, queue=queue, policy={"dispatch": dispatch})


def test_the_mix_names_the_domains_that_the_work_has_by_itself() -> None:
    for scenario in (agents(items=24), build({"n": 8, "batch": 4, "concurrency": 6, "group": 2})):
        events, _ = run(scenario)
        work = work_of(scenario)
        submitted = [e for e in events if isinstance(e, ev.Submitted)]
        assert [e.domain for e in submitted] == [work.item(e.position).domain for e in submitted]
        assert work.item(3, submitted[3].domain) == work.item(3)


def test_stages_follow_one_another_and_each_submits_work_of_its_domain() -> None:
    scenario = build(
        {"n": 8, "batch": 4, "concurrency": 6, "group": 2},
        policy={"dispatch": {"kind": "stages", "round_items": 30}},
        items=30,
    )
    events, summary = run(scenario)
    domains = [e.domain for e in events if isinstance(e, ev.Submitted)]
    assert domains == ["agent"] * 20 + ["reasoning"] * 10
    assert summary["items_submitted"] == 30


def test_pacing_keeps_prompts_from_waiting_where_memory_is_short() -> None:
    _, full = run(crowded(kind="mix"))
    _, paced = run(crowded(kind="paced", fewest=4, unanswered=2.0, settle_s=5.0))
    assert paced["ttft_s"]["p90"] < 0.5 * full["ttft_s"]["p90"]
    assert paced["trained_tokens_per_s"] > 0.8 * full["trained_tokens_per_s"]


def test_refused_requests_come_again_and_no_instance_gets_more_than_its_share() -> None:
    events, summary = run(crowded(kind="mix", refuse_above=16, retry_after_s=2.0))
    most = in_flight = 0
    for event in events:
        in_flight += isinstance(event, ev.Routed) - isinstance(event, ev.Completed)
        most = max(most, in_flight)
    assert most == 2 * 16
    assert summary["refused"] == sum(isinstance(e, ev.Refused) for e in events) > 100
    assert summary["samples_consumed"] > 0
