"""Prefill and decode apart: nothing is lost or told twice, whatever breaks, and no answer is sooner than its KV."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_driver import Job, Plain, cases

from forge.policies.placement import Aggregated, Conditional, Disaggregated, LeastDelay, Placement, PlacementView
from forge.policies.sync import SyncMode
from forge.types import ForgeError
from sim.alarm import HAPPEN, Alarm
from sim.clock import FS
from sim.cluster import Cluster
from sim.engine import Instance, Load, Shape
from sim.fleet import Fleet
from sim.links import Links, Wire
from sim.request import Request
from sim.ways import Role

BLOCK = 16
BYTES = 100  # of a token
WIDTH = BYTES * FS // 1000  # bytes/s of a port: a token crosses in 1000 fs, about what an iteration takes
BACK: tuple[Role, ...] = ("decode", "decode", "prefill")  # requests are sent to the decode instances
AHEAD: tuple[Role, ...] = ("prefill", "prefill", "decode")  # and here to the prefill instances


@dataclass
class Told:
    """By request: times of the first token and of the end, with what was sampled. `lost`: by a crash."""

    first: dict[int, int] = field(default_factory=dict)
    end: dict[int, tuple[int, int]] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)
    loaded: list[tuple[int, int]] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)  # where it ended


class Run:
    """A cluster in an environment, and a listener that refuses to be told anything twice."""

    def __init__(
        self,
        jobs: tuple[Job, ...],
        roles: tuple[Role, ...],
        *,
        block: int = BLOCK,
        capacity: int = 200,
        seats: int = 8,
        budget: int = 60,
        width: int = WIDTH,
        placement: Placement | None = None,
        jump: bool = True,
    ) -> None:
        self.env: Any = simpy.Environment()
        self.told = Told()
        shape = Shape(block=block, capacity=capacity, budget=budget, seats=seats, jump=jump)
        self.all = [Instance(Plain(), shape) for _ in roles]
        self.links = Links(self.env, [width] * len(roles))
        self.cluster = Cluster(
            self.env,
            lambda env, listener: Fleet(env, self.all, listener),
            self,
            roles=roles,
            front=2,
            links=self.links,
            wire=Wire(block=block, token_bytes=BYTES),
            placement=placement or Disaggregated(),
        )
        self.requests = [Request(i, job.prompt, job.output, job.path, keep=job.keep) for i, job in enumerate(jobs)]
        self.down: set[int] = set()
        for i, job in enumerate(jobs):
            self.at(job.arrival, lambda i=i: self.arrive(i))
            if job.cancel is not None:
                self.at(job.arrival + job.cancel, lambda i=i: self.cancel(i))

    def at(self, when: int, do: Any) -> None:
        Alarm(self.env, HAPPEN, lambda _: do()).set(when)

    def arrive(self, i: int) -> None:
        live = [k for k in (0, 1) if k not in self.down]
        if live:
            self.cluster.add(live[i % len(live)], self.requests[i])
        else:
            self.told.lost[i] = self.env.now

    def over(self, i: int) -> bool:
        return i in self.told.end or i in self.told.lost or i in self.told.gone

    def cancel(self, i: int) -> None:
        if not self.over(i) and not self.requests[i].cancelled and self.cluster.cancel(0, self.requests[i]):
            self.told.gone[i] = self.env.now

    def crash(self, i: int, back: int) -> None:
        if i in self.down:
            return
        self.down.add(i)
        for request in self.cluster.crash(i):
            assert not self.over(request.id)
            self.told.lost[request.id] = self.env.now
        self.at(self.env.now + back, lambda: self.up(i))

    def up(self, i: int) -> None:
        self.down.discard(i)
        self.cluster.up(i, self.all[i].version)

    def load(self, version: int, mode: SyncMode) -> None:
        for i in range(len(self.all)):
            if i not in self.down:
                self.cluster.load(i, Load(version, 2000, mode))

    def run(self) -> Told:
        self.env.run()
        return self.told

    def on_first_token(self, instance: int, request: Request) -> None:  # noqa: ARG002 - the listener's signature
        assert request.id not in self.told.first
        assert not self.over(request.id)
        self.told.first[request.id] = self.env.now

    def on_end(self, instance: int, request: Request) -> None:
        assert not self.over(request.id)
        self.told.end[request.id] = self.env.now, request.sampled
        self.told.at[request.id] = instance

    def on_loaded(self, instance: int, version: int) -> None:
        self.told.loaded.append((instance, version))

    def assert_empty(self) -> None:
        """Nobody holds anything any more."""
        assert not self.cluster._flights
        assert not any(self.cluster._ways.bound)
        assert not any(self.cluster._ways.to_compute)
        for source in self.cluster._sources.values():
            assert (source._blocks, source.tokens) == (0, 0)
        for instance in self.all:
            assert (instance.memory.other, instance.running, len(instance.waiting)) == (0, 0, 0)
            assert instance.cache.stored == instance.cache.loose <= instance.memory.capacity


def prepared(case: Any) -> dict[str, Any]:
    return {"block": case.block, "capacity": case.capacity, "seats": case.seats, "budget": case.budget}


both = st.sampled_from([BACK, AHEAD])
widths = st.sampled_from([WIDTH // 30, WIDTH, WIDTH * 1000])
placements = st.sampled_from([Disaggregated(), Conditional(local_below=20), LeastDelay(token_s=2e-14), Aggregated()])
crashes = st.lists(st.tuples(st.integers(0, 150_000), st.integers(0, 2), st.integers(1, 60_000)), max_size=3)


@given(cases(disturbed=False), both, widths, placements)
@settings(max_examples=120, deadline=None)
def test_undisturbed_every_request_ends_after_its_kv_has_come(
    case: Any, roles: Any, width: int, placement: Placement
) -> None:
    run = Run(case.jobs, roles, width=width, placement=placement, **prepared(case))
    told = run.run()
    assert sorted(told.end) == list(range(len(case.jobs)))
    for i, job in enumerate(case.jobs):
        end, sampled = told.end[i]
        assert sampled == job.output
        assert job.arrival < told.first[i] <= end
        assert end - told.first[i] >= (job.output - 1) * 1010
        if not job.path and isinstance(placement, Disaggregated) and job.output > 1:
            assert end - told.first[i] >= job.prompt * BYTES * FS // width + (job.output - 1) * 1010
    run.assert_empty()


@given(cases(), both, widths, placements, crashes)
@settings(max_examples=200, deadline=None)
def test_whatever_breaks_every_request_is_over_once(
    case: Any, roles: Any, width: int, placement: Placement, crashes: Any
) -> None:
    run = Run(case.jobs, roles, width=width, placement=placement, **prepared(case))
    for when, i, back in crashes:
        run.at(when, lambda i=i, back=back: run.crash(i, back))
    for version, (when, _, mode) in enumerate(case.loads):
        run.at(when, lambda version=version, mode=mode: run.load(version + 1, mode))
    told = run.run()
    assert sorted([*told.end, *told.lost, *told.gone]) == list(range(len(case.jobs)))
    for i, (_, sampled) in told.end.items():
        assert sampled == case.jobs[i].output or run.requests[i].cancelled
    run.assert_empty()


@given(cases(), both, crashes)
@settings(max_examples=60, deadline=None)
def test_jumps_are_steps_and_a_run_is_its_input(case: Any, roles: Any, crashes: Any) -> None:
    def told(jump: bool) -> Told:
        run = Run(case.jobs, roles, placement=Conditional(local_below=10), jump=jump, **prepared(case))
        for when, i, back in crashes:
            run.at(when, lambda i=i, back=back: run.crash(i, back))
        return run.run()

    assert told(True) == told(False) == told(True)


def test_the_way_of_one_request_to_the_femtosecond() -> None:
    told = Run((Job(5, 100, 3),), BACK, budget=200).run()
    first = 5 + Plain().mixed(0, 0, [(100, 0)])
    assert told.first == {0: first}
    crossed = first + 100 * BYTES * FS // WIDTH
    # it joins with 100 tokens of KV, and its 2 decodes take a + b context each
    assert told.end == {0: (crossed + 1010 + 3 * 100 + 1010 + 3 * 101, 3)}
    assert told.at == {0: 0}


def test_only_what_the_decode_instance_lacks_crosses() -> None:
    """The second turn's prompt contains the first one and its answer, which the decode instance kept."""
    jobs = (Job(0, 64, 33, ((1, 4),), True), Job(10**6, 120, 2, ((1, 6),)))
    run = Run(jobs, ("decode", "prefill"), budget=200)
    run.arrive = lambda i: run.cluster.add(0, run.requests[i])  # type: ignore[method-assign]
    run.run()
    assert run.links.moved == BYTES * (64 + 120 - 6 * BLOCK)


def test_short_of_the_bound_a_prompt_stays() -> None:
    near = Run((Job(0, 100, 5),), BACK, placement=Conditional(local_below=101), budget=200)
    far = Run((Job(0, 100, 5),), BACK, placement=Conditional(local_below=100), budget=200)
    assert near.run().end[0][0] < far.run().end[0][0]
    assert (near.links.moved, far.links.moved) == (0, 100 * BYTES)
    ahead = Run((Job(0, 100, 5),), AHEAD, placement=Conditional(local_below=101), budget=200)
    assert ahead.run().at == {0: 2}
    assert ahead.links.moved == 0


def test_what_a_prefill_instance_found_is_known_with_the_first_token() -> None:
    """The second prompt has four blocks in common with the first."""
    hits: list[int | None] = []
    jobs = (Job(0, 64, 2, ((1, 4),)), Job(10**6, 100, 2, ((1, 4),)))
    run = Run(jobs, ("decode", "prefill"), budget=200)
    run.arrive = lambda i: run.cluster.add(0, run.requests[i])  # type: ignore[method-assign]
    run.on_first_token = lambda instance, request: hits.append(request.hit)  # type: ignore[method-assign]  # noqa: ARG005
    run.run()
    assert hits == [0, 64]


def test_least_delay_spares_those_who_decode_and_waits_for_nobody() -> None:
    """Alone a prompt stays, as its KV need not cross; beside those who decode it goes; not behind a long queue."""
    policy = LeastDelay(token_s=1e-3, transfer_token_s=1e-4)
    view = PlacementView(
        prompt_tokens=100, missing_here=100, waiting_here=0, decoding=0, missing_there=100, waiting_there=0
    )
    assert not policy.apart(view)
    assert policy.apart(replace(view, decoding=1))
    assert policy.apart(replace(view, waiting_here=11))
    assert not policy.apart(replace(view, decoding=1, waiting_there=90))
    assert not policy.apart(replace(view, decoding=1, missing_here=10))


def test_what_waits_here_is_seen_until_its_first_token() -> None:
    seen: list[int] = []

    class Watch(Aggregated):
        def apart(self, view: PlacementView) -> bool:
            seen.append(view.waiting_here)
            return super().apart(view)

    first = 5 + Plain().mixed(0, 0, [(100, 0)])
    jobs = (Job(5, 100, 5), Job(6, 1, 1), Job(first - 1, 50, 1), Job(first + 1, 1, 1), Job(first + 2, 7, 1))
    run = Run(jobs, ("decode", "prefill"), placement=Watch(), budget=200)
    run.arrive = lambda i: run.cluster.add(0, run.requests[i])  # type: ignore[method-assign]
    run.run()
    run.assert_empty()
    assert seen == [0, 100, 101, 51, 52]


def test_without_a_prefill_instance_prompts_stay() -> None:
    run = Run((Job(1, 100, 5),), BACK, budget=200)
    run.at(0, lambda: run.crash(2, 10**9))
    assert run.run().end.keys() == {0}
    assert run.links.moved == 0


def test_without_a_decode_instance_a_request_waits_for_one() -> None:
    run = Run((Job(0, 100, 5),), AHEAD, budget=200)
    run.at(1, lambda: run.crash(2, 10**6))
    assert run.run().end[0][0] > 10**6


@pytest.mark.parametrize("broken", [0, 2])
def test_a_crash_on_either_side_of_the_wire_loses_the_request_once(broken: int) -> None:
    run = Run((Job(0, 100, 5), Job(0, 100, 5)), BACK, budget=300, width=WIDTH // 100)
    first = Plain().mixed(0, 0, [(100, 0), (100, 0)])
    run.at(first + 1000, lambda: run.crash(broken, 10**4))
    told = run.run()
    assert told.first == {0: first, 1: first}
    assert told.lost == ({0: first + 1000} if broken == 0 else {0: first + 1000, 1: first + 1000})
    assert told.end.keys() == ({1} if broken == 0 else set())
    run.assert_empty()


@pytest.mark.parametrize(("mode", "shared", "computed"), [("in_flight", 0, 0), ("abort", 6, 101)])
def test_kv_crosses_no_version(mode: SyncMode, shared: int, computed: int) -> None:
    """Weights change while the KV is under way: nobody else may hit it, and under `abort` it is computed again."""
    run = Run((Job(0, 100, 5, ((1, 6),)),), ("decode", "prefill"), budget=300, width=WIDTH // 100)
    run.arrive = lambda i: run.cluster.add(0, run.requests[i])  # type: ignore[method-assign]
    run.at(10_000, lambda: run.load(1, mode))
    run.run()
    assert run.all[0].cache.stored_of(1) == shared
    assert run.all[0].usage(run.env.now).prefill_tokens == computed
    assert run.requests[0].versions == (0, 1)


def test_held_kv_never_exceeds_a_prefill_instances_memory() -> None:
    """A slow network: prompts wait for those whose KV has not left, and none is preempted or refused."""
    jobs = tuple(Job(0, 100, 2) for _ in range(6))
    run = Run(jobs, BACK, capacity=16, budget=300, width=WIDTH // 10)
    told = run.run()
    assert len(told.end) == 6
    assert sorted(told.first.values())[1] < 10**4
    assert sorted(told.first.values())[2] > 10**6
    run.assert_empty()


def test_more_bandwidth_is_never_worse_here() -> None:
    jobs = tuple(Job(3000 * i, 40 + 7 * i % 60, 20) for i in range(30))
    ends = []
    for width in (WIDTH // 10, WIDTH, WIDTH * 10):
        told = Run(jobs, BACK, width=width, budget=200).run()
        ends.append(sum(end for end, _ in told.end.values()))
    assert ends[0] > ends[1] > ends[2]


def test_a_prompt_that_fits_nowhere_is_refused() -> None:
    run = Run((), BACK, capacity=10)
    with pytest.raises(ForgeError, match="more than the 10"):
        run.cluster.add(0, Request(0, 150, 30))
    assert replace(Wire(block=16, token_bytes=1), block_bytes=2).size(17) == 21


@pytest.mark.parametrize("jump", [True, False])
def test_kv_that_arrives_joins_beside_a_long_prompt(jump: bool) -> None:
    """The prompt takes 50 iterations of 2 tokens; the arrival joins at the end of the one under way."""
    instance = Instance(Plain(), Shape(block=1, capacity=300, budget=3, seats=2, jump=jump))
    instance.add(Request("long", 100, 2), 0)
    instance.advance(0)
    instance.add(Request("ready", 10, 3, ready=True), 1100)
    ends = []
    while (due := instance.due()) is not None and not ends:
        instance.advance(due)
        ends += [(request.id, due) for request in instance.ended]
    assert ends[0][0] == "ready"
    assert ends[0][1] < 5000
