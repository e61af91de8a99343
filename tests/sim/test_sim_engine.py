"""The jumping instance against a tiny model that takes every iteration by itself, written from the rules alone."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from sim.engine import Cost, Instance, Load, Request

COST = Cost(step_s=4e-3, row_s=1e-4, prefill_token_s=2e-5)
MS = 1_000_000


@dataclass(frozen=True)
class Job:
    arrives: int
    prefill: int
    tokens: int
    cancelled_at: int | None = None


Times = dict[int, tuple[int | None, int, int]]  # job -> (first token ns, end ns, tokens sampled)


def stepped(jobs: list[Job], loads: list[tuple[int, int]], slots: int) -> Times:
    """One loop turn per iteration. Loads are (asked at, ns), never draining."""
    now, times = 0, {}
    first: dict[int, int] = {}
    left: dict[int, int] = {}
    waiting = sorted(range(len(jobs)), key=lambda j: (jobs[j].arrives, j))
    while waiting or left:
        for j in [j for j in waiting if jobs[j].cancelled_at is not None and jobs[j].cancelled_at <= now]:
            waiting.remove(j)
            times[j] = (None, max(jobs[j].cancelled_at or 0, jobs[j].arrives), 0)
        while loads and loads[0][0] <= now:
            asked = [load for load in loads if load[0] <= now]
            loads = loads[len(asked) :]
            now += asked[-1][1]
        here = [j for j in waiting if jobs[j].arrives <= now][: slots - len(left)]
        here = [j for j in here if not (jobs[j].cancelled_at is not None and jobs[j].cancelled_at <= now)]
        if not here and not left:
            now = min([jobs[j].arrives for j in waiting] + [at for at, _ in loads], default=now)
            continue
        waiting = [j for j in waiting if j not in here]
        left |= {j: jobs[j].tokens for j in here}
        now += COST.iteration_ns(len(left), sum(jobs[j].prefill for j in here))
        for j in list(left):
            first.setdefault(j, now)
            left[j] -= 1
            stop = jobs[j].cancelled_at
            if left[j] == 0 or (stop is not None and stop <= now):
                times[j] = (first[j], now, jobs[j].tokens - left.pop(j))
    return times


def jumped(jobs: list[Job], loads: list[tuple[int, int]], slots: int) -> tuple[Times, int]:
    """Drive an `Instance` as its contract says. Returns the times and the number of `advance` calls."""
    instance = Instance(COST, slots)
    requests = [Request(str(j), job.prefill, job.tokens) for j, job in enumerate(jobs)]
    first: dict[str, int] = {}
    times: Times = {}
    calls = 0
    todo = [(job.arrives, 0, j) for j, job in enumerate(jobs)]
    todo += [(at, 1, i) for i, (at, _) in enumerate(loads)]
    todo += [(max(job.cancelled_at, job.arrives), 2, j) for j, job in enumerate(jobs) if job.cancelled_at is not None]
    todo.sort()
    while todo or instance.due() is not None:
        due = instance.due()
        if todo and (due is None or todo[0][0] <= due):
            now, kind, k = todo.pop(0)
            if kind == 0:
                instance.add(requests[k], now)
            elif kind == 1:
                instance.load(Load(k + 1, loads[k][1], drain=False), now)
            elif k not in times and instance.cancel(requests[k], now):
                times[k] = (None, now, 0)
            continue
        assert due is not None
        progress = instance.advance(due)
        calls += 1
        first |= {r.id: due for r in progress.first_tokens}
        times |= {int(r.id): (first[r.id], due, r.sampled) for r in progress.ended}
    return times, calls


JOBS = st.lists(
    st.builds(
        Job,
        arrives=st.one_of(st.integers(0, 200 * MS), st.integers(0, 40).map(lambda i: i * 4_100_000)),
        prefill=st.integers(1, 300),
        tokens=st.integers(1, 60),
    ),
    min_size=1,
    max_size=25,
)


@given(JOBS, st.integers(1, 6))
def test_jumps_end_where_steps_do(jobs: list[Job], slots: int) -> None:
    times, _ = jumped(jobs, [], slots)
    assert times == stepped(jobs, [], slots)


@given(JOBS, st.integers(1, 6), st.lists(st.tuples(st.integers(0, 300 * MS), st.integers(0, 50 * MS)), max_size=3))
def test_jumps_end_where_steps_do_around_weight_loads(
    jobs: list[Job], slots: int, loads: list[tuple[int, int]]
) -> None:
    loads = sorted(loads)
    times, _ = jumped(jobs, loads, slots)
    assert times == stepped(jobs, loads, slots)


def test_a_cancelled_row_ends_with_its_iteration_and_frees_its_slot() -> None:
    each = COST.iteration_ns(1, 0)
    first = COST.iteration_ns(1, 10)
    jobs = [Job(0, 10, 1000, cancelled_at=first + 3 * each + 1), Job(0, 10, 2), Job(0, 10, 5, cancelled_at=1)]
    times, _ = jumped(jobs, [], slots=1)
    end = first + 4 * each
    assert times == {0: (first, end, 5), 1: (end + first, end + first + each, 2), 2: (None, 1, 0)}
    assert times == stepped(jobs, [], slots=1)


def test_an_iteration_that_has_begun_is_not_changed_even_at_its_first_instant() -> None:
    instance = Instance(COST, slots=2)
    instance.add(Request("a", 10, 5), 0)
    instance.advance(0)
    instance.add(Request("b", 10, 5), 0)
    assert instance.due() == COST.iteration_ns(1, 10)


def test_a_long_completion_costs_two_calls() -> None:
    _, calls = jumped([Job(0, 10, 100_000)], [], slots=4)
    assert calls == 3  # plan, first token, last token


def test_draining_waits_for_rows_and_admits_nobody() -> None:
    instance = Instance(COST, slots=4)
    old, new = Request("old", 1, 10), Request("new", 1, 1)
    instance.add(old, 0)
    instance.advance(0)
    instance.load(Load(1, 5 * MS, drain=True), 1)
    instance.add(new, 2)
    ends = []
    while (due := instance.due()) is not None:
        ends += [(r.id, r.versions) for r in instance.advance(due).ended]
    assert ends == [("old", (0, 0)), ("new", (1, 1))]


def test_loading_in_flight_spans_versions() -> None:
    instance = Instance(COST, slots=4)
    request = Request("r", 1, 10)
    instance.add(request, 0)
    instance.advance(0)
    instance.load(Load(1, 5 * MS, drain=False), 10 * MS)
    while (due := instance.due()) is not None:
        instance.advance(due)
    assert request.versions == (0, 1)


def test_a_crash_returns_everything_and_counts_complete_iterations() -> None:
    instance = Instance(COST, slots=1)
    for name in ("a", "b"):
        instance.add(Request(name, 3, 50), 0)
    instance.advance(0)
    now = COST.iteration_ns(1, 3)
    instance.advance(now)
    lost = instance.crash(now + 2 * COST.iteration_ns(1, 0) + 1)
    assert [r.id for r in lost] == ["a", "b"]
    usage = instance.usage(10**12)
    assert (usage.steps, usage.decode_tokens, usage.prefill_tokens) == (3, 3, 3)
    assert instance.due() is None
