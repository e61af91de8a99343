"""Drives one instance from a list of happenings, as the fleet does, and writes down what came of it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from hypothesis import strategies as st

from forge.policies.sync import SyncMode
from sim.engine import Instance, Load, Shape
from sim.iteration import one_by_one
from sim.request import Request

MODES: tuple[SyncMode, ...] = get_args(SyncMode)
CHAINS = (1, 3, 10, 11, 30, 31)  # that `cases` may use


class Plain:
    """Whole femtoseconds of no real machine; every term of the contract is there."""

    unit = 1

    def line(self, rows: int) -> tuple[int, int, int]:
        return 1000 + 10 * rows, 3, 1

    def mixed(self, rows: int, context: int, chunks: Sequence[tuple[int, int]]) -> int:
        return 1000 + 10 * rows + 3 * context + sum(20 * new + new * before // 7 for new, before in chunks)

    def run(self, rows: int, context: int, grown: int, chunks: Sequence[tuple[int, int]]) -> list[int]:
        return one_by_one(self, rows, context, grown, chunks)


@dataclass(frozen=True)
class Job:
    """`cancel`: femtoseconds after its arrival."""

    arrival: int
    prompt: int
    output: int
    path: tuple[tuple[int, int], ...] = ()
    keep: bool = False
    cancel: int | None = None


@dataclass(frozen=True)
class Case:
    block: int
    capacity: int
    budget: int
    seats: int
    jobs: tuple[Job, ...]
    loads: tuple[tuple[int, int, SyncMode], ...] = ()  # (when, how long, mode)
    looks: tuple[int, ...] = ()  # when the cache is looked at
    forgets: tuple[tuple[int, int], ...] = ()  # (when, chain)


@dataclass
class Told:
    """By job: time of the first token; (time, sampled, preemptions, hit) of the end, None for one that was cancelled
    while it waited. `seen`: stored blocks by chain at every look; weights loads."""

    first: dict[int, int] = field(default_factory=dict)
    end: dict[int, tuple[int, int, int, int | None] | None] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)
    totals: tuple[int, ...] = ()
    spans: int = 0
    preemptions: int = 0
    stored: dict[int, int] = field(default_factory=dict)


def hanging(case: Case, chain: int) -> list[int]:
    """The chain and those behind it on the paths, the last first: all of them are left together."""
    depth = {chain: 0}
    for names in ([name for name, _ in job.path] for job in case.jobs):
        if chain in names:
            for far, name in enumerate(names[names.index(chain) :]):
                depth[name] = max(far, depth.get(name, 0))
    return sorted(depth, key=lambda name: (-depth[name], name))


def stored(instance: Instance) -> dict[int, int]:
    return {chain: entry.stored for chain, entry in instance.cache.entries.items() if entry.stored}


def drive(case: Case, *, jump: bool) -> Told:
    """What happens at one instant happens in the order: arrivals, loads, cancellations, looks, chains that are left;
    then plans."""
    shape = Shape(block=case.block, capacity=case.capacity, budget=case.budget, seats=case.seats, jump=jump)
    instance, told = Instance(Plain(), shape, listen=True), Told()
    requests = [Request(i, job.prompt, job.output, job.path, keep=job.keep) for i, job in enumerate(case.jobs)]
    coming: list[tuple[int, int, int]] = [(job.arrival, 0, i) for i, job in enumerate(case.jobs)]
    coming += [(when, 1, i) for i, (when, _, _) in enumerate(case.loads)]
    coming += [(job.arrival + job.cancel, 2, i) for i, job in enumerate(case.jobs) if job.cancel is not None]
    coming += [(when, 3, 0) for when in case.looks]
    coming += [(when, 4, i) for i, (when, _) in enumerate(case.forgets)]
    heapq.heapify(coming)
    while coming or instance.due() is not None:
        due = instance.due()
        if coming and (due is None or coming[0][0] <= due):
            _happen(case, instance, requests, heapq.heappop(coming), told)
        elif due is not None:
            _advance(instance, due, told)
    usage = instance.usage(1 << 62)
    told.totals = (usage.busy_fs, usage.iterations, usage.prefill_tokens, usage.sampled_tokens, instance.cache.evicted)
    told.spans, told.preemptions, told.stored = usage.spans, usage.preemptions, stored(instance)
    return told


def _happen(case: Case, instance: Instance, requests: list[Request], what: tuple[int, int, int], told: Told) -> None:
    now, kind, i = what
    if kind == 0:
        instance.add(requests[i], now)
    elif kind == 1:
        _, duration, mode = case.loads[i]
        instance.load(Load(i + 1, duration, mode), now)
    elif kind == 2 and i not in told.end:
        if instance.cancel(requests[i], now):
            told.end[i] = None
    elif kind == 3:
        instance.sync(now)
        told.seen.append((now, stored(instance)))
    elif kind == 4:
        instance.forget(hanging(case, case.forgets[i][1]), now)


def _advance(instance: Instance, now: int, told: Told) -> None:
    instance.advance(now)
    for request in instance.first_tokens:
        told.first[request.id] = now
    for request in instance.ended:
        told.end[request.id] = now, request.sampled, request.preemptions, request.hit
    if instance.loaded is not None:
        told.seen.append((now, "loaded", instance.loaded))
    memory = instance.memory
    used = memory.other + memory.cache.stored + memory.decodes.private(memory.planned)
    assert 0 <= used <= memory.capacity
    assert memory.cache.loose == sum(entry.stored for entry in memory.cache.unused())
    assert memory.cache.stored >= sum(stored(instance).values())


@st.composite
def cases(draw: st.DrawFn, *, disturbed: bool = True) -> Case:
    """Tight memory, shared prompts, conversations that grow, and, where `disturbed`, loads, cancellations and looks."""
    block, capacity = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(12, 60))
    seats = draw(st.integers(1, 6))
    grown: dict[int, int] = {}
    jobs, now = [], 0
    for _ in range(draw(st.integers(1, 14))):
        now += draw(st.sampled_from([0, 0, 700, 5_000, 40_000]))
        prompt = draw(st.integers(1, min(capacity * block // 2, 120)))
        output = draw(st.integers(1, 30))
        if -(-(prompt + output) // block) > capacity:
            continue
        path, keep = _path(draw, prompt // block, (prompt + output - 1) // block, grown)
        cancel = draw(st.none() | st.integers(0, 60_000)) if disturbed else None
        jobs.append(Job(now, prompt, output, path, keep, cancel))
    times = st.integers(0, 200_000)
    loads = st.lists(st.tuples(times, st.integers(1, 5_000), st.sampled_from(MODES)), max_size=3)
    forgets = st.lists(st.tuples(times, st.sampled_from(CHAINS)), max_size=8)
    return Case(
        block=block,
        capacity=capacity,
        budget=draw(st.integers(seats + 1, 60)),
        seats=seats,
        jobs=tuple(jobs),
        loads=tuple(sorted(draw(loads))) if disturbed else (),
        looks=tuple(sorted(draw(st.lists(times, max_size=8)))) if disturbed else (),
        forgets=tuple(sorted(draw(forgets))) if disturbed else (),
    )


def _path(draw: st.DrawFn, full: int, final: int, grown: dict[int, int]) -> tuple[tuple[tuple[int, int], ...], bool]:
    """A prompt shared by all, then one of two conversations, which never shrink."""
    shared = draw(st.sampled_from([0, 1, 3]))
    if not shared or shared > full:
        return (), False
    talk = 10 * shared + draw(st.integers(0, 1))
    own = full - shared
    if own < grown.get(talk, 0):
        return ((shared, shared),), False
    keep = draw(st.booleans())
    grown[talk] = final - shared if keep else own
    return ((shared, shared), (talk, own)), keep
