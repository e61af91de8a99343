"""More of anything good never hurts: bandwidth, KV memory, instances, tools, budget, seats; on the same work.

Not a theorem for first come, first served with preemption and a shared cache: a request that arrives a little earlier
may push another's prefix out (scheduling anomalies, as Graham's of lists: SIAM J. Appl. Math. 17, 1969). So single
runs may lose `ANOMALY`, a little more than was seen (6%: faster tools where KV memory is short); the mean over seeds
may lose `NOISE`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from agent_scenarios import AGENT, agents

from forge import trace as ev
from forge.cost import CostModel, Deployment, hardware, model_card
from forge.cost.cards import folder
from forge.policies.router_published import CacheAware
from forge.sections_agents import AgentDomain
from sim.engine import Instance, Shape
from sim.iteration import RooflineTimes
from sim.serve import Loop, Serving
from sim.sessions import Session
from sim.synthetic import Agents
from sim.traces.reading import Recorded
from sim.world import simulate

ANOMALY = 0.08  # of a single run
NOISE = 0.02  # of the mean over seeds
SEEDS = range(4)

SERVED: dict[str, Any] = {
    "bandwidth": 1.0,
    "kv_tokens": 12_000,
    "instances": 2,
    "tools": 0.1,
    "budget": 256,
    "seats": 8,
}
MORE = {"bandwidth": 2.0, "kv_tokens": 24_000, "instances": 3, "tools": 0.02, "budget": 2048, "seats": 32}


@cache
def served(seed: int, **given: Any) -> tuple[float, float]:
    """(sampled tokens a second, mean seconds of a session) of 60 agents, 40 at once."""
    of = {**SERVED, **given}
    wait = {
        key: value * of["tools"] if key in ("median", "cap") else value for key, value in AGENT["tool_wait"].items()
    }
    domain = AgentDomain.model_validate(AGENT | {"tool_wait": wait, "failures": {"hang": 0.0}})
    work = Agents({"agent": domain}, seed=seed, group=4, block=16)
    members = [member for index in range(15) for member in work.item(index).members]
    trace = Recorded(16, tuple(Session(name=str(i), start_s=0.0, steps=m.steps) for i, m in enumerate(members)))
    card = hardware("h100_sxm")
    card = replace(card, bandwidth=card.bandwidth * of["bandwidth"])
    times = RooflineTimes(CostModel(Deployment(model=model_card("qwen3_8b"), hardware=card)))
    shape = Shape(capacity=of["kv_tokens"] // 16, budget=of["budget"], seats=of["seats"])
    made = [Instance(times, shape, listen=True) for _ in range(of["instances"])]
    rows = Serving(trace, made, CacheAware(), loop=Loop(concurrency=40), seed=seed).run()
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for row in rows:
        begins[row.session] = min(row.arrived, begins.get(row.session, row.arrived))
        ends[row.session] = max(row.ended, ends.get(row.session, 0))
    seconds = fmean((ends[s] - begins[s]) / 1e15 for s in ends)
    return sum(row.output for row in rows) / (max(ends.values()) / 1e15), seconds


def no_slower(before: list[tuple[float, float]], after: list[tuple[float, float]]) -> None:
    """(rate, seconds) of the same seeds, before and after there is more of something."""
    rates = [b[0] / a[0] for a, b in zip(before, after, strict=True)]
    seconds = [b[1] / a[1] for a, b in zip(before, after, strict=True)]
    assert min(rates) > 1 - ANOMALY
    assert max(seconds) < 1 + ANOMALY
    assert fmean(rates) > 1 - NOISE
    assert fmean(seconds) < 1 + NOISE


@pytest.mark.parametrize("what", list(MORE))
def test_more_of_anything_serves_no_slower(what: str) -> None:
    before = [served(seed) for seed in SEEDS]
    after = [served(seed, **{what: MORE[what]}) for seed in SEEDS]
    no_slower(before, after)


@pytest.mark.parametrize("what", ["bandwidth", "kv_tokens", "instances"])
def test_what_is_short_pays(what: str) -> None:
    """The work above is crowded: each of these is worth a tenth at the least, so that the test above is one."""
    rates = [served(seed, **{what: MORE[what]})[0] / served(seed)[0] for seed in SEEDS]
    assert fmean(rates) > 1.1


# --- training runs ------

TRAINED: dict[str, Any] = {"instances": 2, "deployment": {"kv_tokens": 16_000, "budget": 256}}
MORE_TRAINED: dict[str, dict[str, Any]] = {
    "kv_tokens": {"deployment": {"kv_tokens": 40_000}},
    "budget": {"deployment": {"budget": 2048}},
    "instances": {"instances": 4},
    "tools": {"agent": {"tool_wait": AGENT["tool_wait"] | {"median": 0.2, "cap": 50}}},
    "trainer": {"sim": {"train_step_s": 0.2}},
    "bandwidth": {},
}


def trained(seed: int, more: dict[str, Any]) -> tuple[float, float]:
    """(trained tokens a second, mean seconds from an item's submission to its end)."""
    given = TRAINED | more | {"deployment": TRAINED["deployment"] | more.get("deployment", {})}
    run = simulate(agents(items=20, seed=seed, **given))
    begins = {e.position: e.t for e in run.events if isinstance(e, ev.Submitted)}
    spans = [e.t - begins[e.position] for e in run.events if isinstance(e, ev.Finished | ev.Dead)]
    tokens = sum(e.tokens for e in run.events if isinstance(e, ev.Committed))
    return tokens / run.events[-1].t, fmean(spans)


@pytest.fixture(scope="module")
def usual() -> list[tuple[float, float]]:
    return [trained(seed, {}) for seed in SEEDS]


@pytest.mark.parametrize("what", list(MORE_TRAINED))
def test_more_of_anything_trains_no_slower(what: str, usual: list[tuple[float, float]], tmp_path: Path) -> None:
    more = MORE_TRAINED[what]
    if what == "bandwidth":
        card = hardware("h100_sxm")
        path = tmp_path / "faster.toml"
        path.write_text((folder("hardware") / "h100_sxm.toml").read_text().replace("3.35e12", "6.7e12"))
        assert hardware(path).bandwidth == 2 * card.bandwidth
        more = {"deployment": {"hardware": str(path)}}
    after = [trained(seed, more) for seed in SEEDS]
    no_slower(usual, after)
