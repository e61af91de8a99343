"""Scenarios with prefill instances, KV tiers and speculation: training runs and serving on all of it at once."""

from __future__ import annotations

from collections import Counter
from statistics import fmean
from typing import Any

import pytest
from agent_scenarios import agents
from test_queueing import agents as agent_trace

from forge import trace as ev
from forge.metrics import LawCheck
from forge.policies.router import LeastLoaded
from forge.scenario import Scenario, parse, resolved
from forge.types import ForgeError
from sim.cluster import Cluster
from sim.deploy import deployment
from sim.machines import machines, token_bytes
from sim.serve import Loop, Row, Serving
from sim.tiers import Tiers
from sim.world import Run, simulate

PREFILL = {"instances": 2, "tp": 2}
TIERS = {"l2_gib": 4.0, "l3_gib": 16.0}
SPECULATION = {"acceptance": [0.886, 0.77, 0.663], "drift": 0.05}
ALL: dict[str, Any] = {"tiers": TIERS, "speculation": SPECULATION}


def simulated(mode: str, **sim: Any) -> Run:
    scenario = agents(items=24, deployment={"prefill": PREFILL}, policy={"sync": {"mode": mode}}, sim={**ALL, **sim})
    return simulate(scenario)


@pytest.mark.parametrize("mode", ["in_flight", "drain", "abort"])
def test_training_runs_on_all_of_it_with_crashes(mode: str) -> None:
    run = simulated(mode, instance_mtbf_s=40.0, instance_repair_s=10.0)
    scenario = run.scenario
    laws = LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)
    for event in run.events:
        laws.apply(event)
    assert laws.violations == []
    routed = Counter(e.request for e in run.events if isinstance(e, ev.Routed))
    completed = Counter(e.request for e in run.events if isinstance(e, ev.Completed))
    assert set(routed.values()) == {1}
    assert completed == routed
    finishes = Counter(e.finish for e in run.events if isinstance(e, ev.Completed))
    assert finishes["stop"] > 500
    assert finishes["lost"] > 0
    known = range(scenario.engine.instances)
    assert {e.instance for e in run.events if isinstance(e, ev.Loaded | ev.InstanceDown | ev.Reported)} <= set(known)
    used = [e for e in run.events if isinstance(e, ev.Usage)][-1]
    assert len(used.busy_s) == scenario.engine.instances + PREFILL["instances"]
    assert all(prefilled > 0 for prefilled in used.prefill_tokens)


def test_a_training_run_is_its_scenario() -> None:
    assert simulated("in_flight").events == simulated("in_flight").events


def test_a_version_is_published_when_the_prefill_instances_serve_it_too() -> None:
    """Else first tokens would be older than the published version says."""
    run = simulated("in_flight")
    newest, promised, kept = 0, {}, 0
    for event in run.events:
        if isinstance(event, ev.Published):
            newest = event.version
        elif isinstance(event, ev.Routed):
            promised[event.request] = newest
        elif isinstance(event, ev.Completed) and event.finish == "stop":
            assert promised[event.request] <= event.versions[0] <= event.versions[1]
            kept += promised[event.request] > 0
    assert kept > 100


# --- serving ------


def deployed(prefill: dict[str, Any] | None = None, **sim: Any) -> Scenario:
    return agents(deployment={"kv_tokens": 9100} | ({"prefill": prefill} if prefill else {}), sim=sim)


def served(scenario: Scenario) -> tuple[list[Row], Any]:
    made = machines(scenario)
    run = Serving(
        agent_trace(30, seed=5), made.instances, LeastLoaded(), loop=Loop(concurrency=40), seed=7, front=made.before
    )
    return run.run(), run.fleet


@pytest.mark.parametrize("prefill", [None, PREFILL])
@pytest.mark.parametrize("sim", [{}, {"tiers": TIERS}, {"speculation": SPECULATION}, ALL])
def test_every_request_is_served_whatever_it_runs_on(prefill: Any, sim: Any) -> None:
    rows, front = served(deployed(prefill, **sim))
    steps = [step for session in agent_trace(30, seed=5).recorded for step in session.steps]
    assert sorted((row.prompt, row.output) for row in rows) == sorted((step.prompt, step.output) for step in steps)
    assert all(row.arrived < row.first <= row.ended for row in rows)
    if prefill:
        assert isinstance(front, Cluster)
        assert len(front.instances) == 3
        assert front._links.moved > 0


def test_each_part_does_what_it_is_for() -> None:
    plain, _ = served(deployed())
    tiered, front = served(deployed(tiers=TIERS))
    drafted, _ = served(deployed(speculation=SPECULATION))
    apart, _ = served(deployed(PREFILL))
    assert isinstance(front, Tiers)
    assert front.hits.l2 > 0

    def ttft(rows: list[Row]) -> float:
        return fmean(row.ttft_s for row in rows)

    def tpot(rows: list[Row]) -> float:
        return fmean(row.tpot_s for row in rows if row.output > 20)

    assert sum(row.hit for row in tiered) > sum(row.hit for row in plain)
    assert ttft(tiered) <= 1.02 * ttft(plain)
    assert tpot(drafted) < 0.7 * tpot(plain)
    assert tpot(apart) < tpot(plain)  # no decode waits for another's prompt


def test_more_bandwidth_and_more_host_memory_never_hurt_here() -> None:
    def ttft_and_end(scenario: Scenario) -> tuple[float, float]:
        rows, _ = served(scenario)
        return fmean(row.ttft_s for row in rows), fmean(row.ended - row.first for row in rows)

    narrow = ttft_and_end(deployed(PREFILL | {"bandwidth": 2e8}))
    wide = ttft_and_end(deployed(PREFILL | {"bandwidth": 2e10}))
    assert wide[1] < narrow[1]
    ttfts = [ttft_and_end(deployed(tiers={"l2_gib": size}))[0] for size in (0.0, 1.0, 16.0)]
    assert ttfts[2] <= 1.02 * ttfts[1] <= 1.04 * ttfts[0]


# --- what they are made of ------


def test_what_does_not_change_costs_nothing() -> None:
    """Without the sections the front is the fleet itself."""
    scenario = agents()
    made = machines(scenario)
    assert type(made.before(None, None)).__name__ == "Fleet"  # type: ignore[arg-type]
    assert made.front == len(made.instances) == scenario.engine.instances


def test_kv_of_a_token_is_the_fields() -> None:
    """Llama-70B in bf16: 327 680 bytes, however many devices share it."""
    for tp in (1, 4, 8):
        scenario = agents(deployment={"model": "llama_3_1_70b", "tp": tp, "kv_tokens": 40_000})
        assert scenario.sim.deployment is not None
        assert token_bytes(deployment(scenario.sim.deployment)) == 327_680


def test_a_scenario_reads_back_what_it_resolved_to() -> None:
    scenario = agents(deployment={"prefill": PREFILL}, sim=ALL)
    assert parse(resolved(scenario), "again") == scenario


@pytest.mark.parametrize(
    ("sim", "message"),
    [
        ({"deployment": None, "tiers": TIERS}, "tiers: needs sim.deployment"),
        ({"deployment": None, "speculation": SPECULATION}, "speculation: needs sim.deployment"),
        ({"speculation": {"acceptance": 1.5}}, "acceptance"),
        ({"tiers": {"l2_gib": -1}}, "l2_gib"),
        ({"tiers": {"l4_gib": 1}}, "l4_gib: unknown key"),
    ],
)
def test_impossible_sections_are_refused(sim: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        agents(sim=sim)
