"""Tiers of KV: what is where, when fetching it is worth it, and that no block crosses versions."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_driver import Plain, cases
from test_queueing import agents

from forge.policies.router import LeastLoaded
from sim.alarm import HAPPEN, Alarm
from sim.clock import FS
from sim.engine import Instance, Load, Shape
from sim.iteration import LineTimes, Times
from sim.links import Links, Wire
from sim.request import Request
from sim.serve import Loop, Row, Serving
from sim.tier_store import Stores, Tier
from sim.tiers import Roads, Tiers
from sim.traces.reading import Recorded

BLOCK, BYTES = 16, 100
A, B, C = (0, 1), (0, 2), (0, 3)


# --- what is where ------


def test_least_recently_used_goes_first_from_its_end() -> None:
    gone: list[Any] = []
    tier = Tier(10, lambda key, low, high: gone.append((key, low, high)))
    tier.put(A, 0, 6)
    tier.put(B, 2, 6)
    tier.put(C, 0, 2)
    assert gone == [(A, 4, 6)]
    tier.touch(A)
    tier.put(C, 2, 3)
    assert gone[1:] == [(B, 5, 6)]
    assert [tier.reach(A, 1), tier.reach(A, 4), tier.reach(B, 2), tier.reach(B, 0)] == [4, 4, 5, 0]
    assert tier.stored == 10


spans = st.tuples(st.sampled_from([A, B, C]), st.integers(0, 12), st.integers(1, 6))


@given(st.lists(spans, max_size=30), st.integers(0, 25))
def test_a_tier_against_sets_of_blocks(puts: list[Any], capacity: int) -> None:
    """Every block is here or has overflowed, never both, and none goes while a chain used longer ago has some."""
    mine: dict[Any, set[int]] = {A: set(), B: set(), C: set()}
    order: list[Any] = []  # keys, the least recently used first

    def overflow(key: Any, low: int, high: int) -> None:
        assert not any(mine[older] for older in order[: order.index(key)])
        assert high == max(mine[key]) + 1
        mine[key] -= set(range(low, high))

    tier = Tier(capacity, overflow)
    for key, low, length in puts:
        mine[key] |= set(range(low, low + length))
        order = [other for other in order if other != key] + [key]
        full = sum(map(len, mine.values()))
        tier.put(key, low, low + length)
        assert tier.stored == sum(map(len, mine.values())) == min(full, capacity)
        for other, held in mine.items():
            for start in range(20):
                end = start
                while end in held:
                    end += 1
                assert tier.reach(other, start) == end


def test_what_the_host_has_no_room_for_goes_to_all() -> None:
    stores = Stores(2, l2=4, l3=3)
    spill = stores.spill(0, lambda: 7)
    spill(1, 0, 6)
    assert stores.find(0, (7, 1), 0) == (2, 4)
    assert stores.find(0, (7, 1), 4) == (3, 6)
    assert stores.find(1, (7, 1), 4) == (3, 6)
    assert stores.find(1, (7, 1), 0) == (0, 0)
    assert stores.find(0, (8, 1), 0) == (0, 0)


# --- one instance ------


class Run:
    """Instances with tiers in an environment, and what they tell."""

    def __init__(
        self, *, count: int = 1, capacity: int = 30, l2: int = 100, l3: int = 0, width: int = 10**18, budget: int = 300
    ) -> None:
        self.env: Any = simpy.Environment()
        self.first: dict[Any, int] = {}
        self.ended: dict[Any, int] = {}
        stores = Stores(count, l2, l3)
        self.all: list[Instance] = []
        for i in range(count):
            spill = stores.spill(i, lambda i=i: self.all[i].version)  # type: ignore[misc]
            self.all.append(
                Instance(Plain(), Shape(block=BLOCK, capacity=capacity, budget=budget, seats=8), spill=spill)
            )
        links = Links(self.env, [width] * (count + 1))
        wire = Wire(block=BLOCK, token_bytes=BYTES)
        roads = Roads(links=links, l2=wire, l3=wire)
        times: list[Times] = [Plain()] * count
        self.tiers = Tiers(self.env, self.all, self, stores=stores, roads=roads, times=times)
        self.links = links

    def at(self, when: int, do: Any) -> None:
        Alarm(self.env, HAPPEN, lambda _: do()).set(when)

    def add(self, when: int, name: Any, prompt: int, path: Any, i: int = 0, output: int = 1) -> Request:
        request = Request(name, prompt, output, path)
        self.at(when, lambda: self.tiers.add(i, request))
        return request

    def on_first_token(self, instance: int, request: Request) -> None:  # noqa: ARG002 - the listener's signature
        assert request.id not in self.first
        self.first[request.id] = self.env.now

    def on_end(self, instance: int, request: Request) -> None:  # noqa: ARG002 - the listener's signature
        assert request.id not in self.ended
        self.ended[request.id] = self.env.now

    def on_loaded(self, instance: int, version: int) -> None: ...


def hits(run: Run) -> tuple[int, int, int, int]:
    return run.tiers.hits.l1, run.tiers.hits.l2, run.tiers.hits.l3, run.tiers.hits.missed


FAR = 10**6  # fs, after which what came before is over


def evicted(run: Run) -> None:
    """Chain 1 is computed, then chain 2 puts all of it out."""
    run.add(0, "first", 320, ((1, 20),))
    run.add(FAR, "other", 470, ((2, 29),))


def test_evicted_blocks_come_back_to_the_femtosecond() -> None:
    run = Run()
    evicted(run)
    request = run.add(2 * FAR, "again", 330, ((1, 20),))
    run.env.run()
    fetched = 2 * FAR + 320 * BYTES * FS // 10**18
    assert run.first["again"] == fetched + Plain().mixed(0, 0, [(10, 320)])
    assert request.hit == 320
    assert run.links.moved == 320 * BYTES
    assert hits(run) == (0, 320, 0, 320 + 470 + 10)


def test_a_slow_tier_is_left_alone() -> None:
    """Computing 330 tokens takes less than the 32 000 fs that 320 of them take at this bandwidth."""
    run = Run(width=10**15)
    evicted(run)
    run.add(2 * FAR, "again", 330, ((1, 20),))
    run.env.run()
    assert run.links.moved == 0
    times = Plain()
    assert run.first["again"] == 2 * FAR + times.mixed(0, 0, [(300, 0)]) + times.mixed(0, 0, [(30, 300)])
    assert hits(run)[1:3] == (0, 0)


def test_other_instances_find_it_in_l3_only() -> None:
    found = {}
    for l2, l3 in ((100, 100), (0, 100)):
        run = Run(count=2, l2=l2, l3=l3)
        evicted(run)
        run.add(2 * FAR, "again", 330, ((1, 20),), i=1)
        run.env.run()
        found[l2] = hits(run)[1:3]
    assert found[100] == (0, 0)
    assert found[0][0] == 0
    assert found[0][1] == 20 * BLOCK


def test_nothing_crosses_versions() -> None:
    run = Run(l3=100)
    evicted(run)
    run.at(2 * FAR, lambda: run.tiers.load(0, Load(1, 5, "in_flight")))
    run.add(3 * FAR, "again", 330, ((1, 20),))
    run.env.run()
    assert hits(run)[:3] == (0, 0, 0)


@pytest.mark.parametrize("when", [1, 300])
def test_what_arrives_after_a_load_is_for_nothing(when: int) -> None:
    run = Run(width=10**17)
    evicted(run)
    request = run.add(2 * FAR, "again", 330, ((1, 20),))
    run.at(2 * FAR + when, lambda: run.tiers.load(0, Load(1, 5, "in_flight")))
    run.env.run()
    assert run.links.moved > 0
    assert request.hit == 0
    assert hits(run)[1] == 0


def test_a_group_fetches_its_prompt_once() -> None:
    run = Run()
    evicted(run)
    for name in range(4):
        run.add(2 * FAR, name, 330 + name, ((1, 20),))
    run.env.run()
    assert run.links.moved <= 20 * BLOCK * BYTES
    assert len(run.ended) == 6
    assert hits(run)[0] >= 3 * 320


def test_a_cancelled_or_crashed_fetch() -> None:
    for crash in (False, True):
        run = Run(width=10**17)
        evicted(run)
        made = [run.add(2 * FAR, name, 330, ((1, 20),)) for name in ("a", "b")]
        told: list[Any] = []
        if crash:
            run.at(2 * FAR + 5, lambda told=told, run=run: told.append(run.tiers.crash(0)))
        else:
            run.at(2 * FAR + 5, lambda told=told, run=run, made=made: told.append(run.tiers.cancel(0, made[0])))
        run.env.run()
        assert told == [made] if crash else told == [True]
        assert set(run.ended) == ({"first", "other"} if crash else {"first", "other", "b"})
        assert not run.tiers._fetching
        assert not run.tiers._coming[0]


@given(cases(), st.sampled_from([10**15, 10**17, 10**19]), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_every_request_is_over_once(case: Any, width: int, l2: int, l3: int) -> None:
    run = Run(count=2, capacity=case.capacity * case.block, l2=l2, l3=l3, width=width, budget=60)
    gone, requests = set(), []
    for i, job in enumerate(case.jobs):
        requests.append(run.add(job.arrival, i, job.prompt * 3, job.path, i % 2, job.output))
        if job.cancel is not None:

            def cancel(i: int = i) -> None:
                if i not in run.ended and run.tiers.cancel(i % 2, requests[i]):
                    gone.add(i)

            run.at(job.arrival + job.cancel, cancel)
    for version, (when, _, mode) in enumerate(case.loads):
        run.at(when, lambda version=version, mode=mode: run.tiers.load(0, Load(version + 1, 500, mode)))
    run.env.run()
    assert not gone & set(run.ended)
    assert gone | set(run.ended) == set(range(len(case.jobs)))


# --- served agents ------


def served(trace: Recorded, l2: int, l3: int = 0, width: int = 10**11) -> tuple[list[Row], Tiers]:
    """Two instances whose own memory is far too small for the sessions they serve. A token is 100 kB."""
    times = LineTimes(step_s=2e-3, row_s=1e-4, prefill_token_s=1e-4)
    stores, made = Stores(2, l2, l3), []
    for i in range(2):
        spill = stores.spill(i, lambda i=i: made[i].version)  # type: ignore[misc]
        made.append(Instance(times, Shape(capacity=500, budget=512, seats=16), listen=True, spill=spill))
    built: list[Tiers] = []

    def build(env: Any, listener: Any) -> Tiers:
        wire = Wire(block=16, token_bytes=100_000)
        roads = Roads(links=Links(env, [width, width, width // 4]), l2=wire, l3=wire)
        built.append(Tiers(env, made, listener, stores=stores, roads=roads, times=[times, times]))
        return built[0]

    rows = Serving(trace, made, LeastLoaded(), loop=Loop(concurrency=20), seed=7, front=build).run()
    return rows, built[0]


def test_more_l2_and_more_bandwidth_help_agents() -> None:
    trace = agents(20, seed=5)
    ttft = {}
    for l2, l3, width in (
        (0, 0, 10**11),
        (500, 0, 10**11),
        (8000, 0, 10**11),
        (8000, 0, 4 * 10**9),
        (500, 8000, 10**11),
    ):
        rows, tiers = served(trace, l2, l3, width)
        assert sum(row.output for row in rows) == sum(step.output for s in trace.recorded for step in s.steps)
        ttft[l2, l3, width] = fmean(row.ttft_s for row in rows)
        assert (tiers.hits.l2 > 0) == (l2 > 0)
    assert ttft[8000, 0, 10**11] < 0.8 * ttft[0, 0, 10**11]
    assert ttft[8000, 0, 10**11] <= 1.02 * ttft[500, 0, 10**11] <= 1.05 * ttft[0, 0, 10**11]
    assert ttft[8000, 0, 10**11] <= ttft[8000, 0, 4 * 10**9]
    assert ttft[500, 8000, 10**11] <= 1.02 * ttft[500, 0, 10**11]


def test_a_run_is_its_seeds() -> None:
    trace = agents(8, seed=6)
    assert served(trace, 500, 1000)[0] == served(trace, 500, 1000)[0]
