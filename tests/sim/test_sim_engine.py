"""The instance: jumping ends exactly where stepping does, and single rules worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from instance_driver import Case, Job, Plain, cases, drive

from forge.types import ForgeError
from sim.engine import Instance, Shape
from sim.request import Request


@given(cases())
@settings(max_examples=300, deadline=None)
def test_jumps_are_steps(case: Case) -> None:
    jumped, stepped = drive(case, jump=True), drive(case, jump=False)
    assert (jumped.first, jumped.end, jumped.seen) == (stepped.first, stepped.end, stepped.seen)
    assert (jumped.totals, jumped.stored) == (stepped.totals, stepped.stored)
    assert jumped.spans <= stepped.spans


@given(cases())
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_with_all_its_tokens_unless_cancelled(case: Case) -> None:
    told = drive(case, jump=True)
    assert sorted(told.end) == list(range(len(case.jobs)))
    for i, job in enumerate(case.jobs):
        end = told.end[i]
        if job.cancel is None:
            assert end is not None
            assert end[1] == job.output
            assert job.arrival < told.first[i] <= end[0]


@given(cases(disturbed=False))
@settings(max_examples=150, deadline=None)
def test_tokens_and_time_are_conserved(case: Case) -> None:
    """Every prompt token is computed once or found, and computed again after a preemption only."""
    told = drive(case, jump=True)
    busy, iterations, prefilled, sampled, _ = told.totals
    ends = [told.end[i] for i in range(len(case.jobs))]
    found = sum(end[3] or 0 for end in ends if end is not None)
    assert sampled == sum(job.output for job in case.jobs)
    if not told.preemptions:
        assert prefilled + found == sum(job.prompt for job in case.jobs)
    assert iterations >= max((job.output for job in case.jobs), default=0)
    assert busy <= max((end[0] for end in ends if end is not None), default=0)


def test_a_long_completion_is_three_spans() -> None:
    """Its prompt of 100 tokens is one mixed iteration, then 999 decodes are one span."""
    told = drive(Case(16, 100, 200, 4, (Job(0, 100, 1000),)), jump=True)
    assert told.spans == 2
    first = Plain().mixed(0, 0, [(100, 0)])
    assert told.first[0] == first
    # k a + b (k S + k (k - 1) / 2), with a = 1010 of one row, b = 3, S = 100
    assert told.end[0] == (first + 999 * 1010 + 3 * (999 * 100 + 999 * 998 // 2), 1000, 0, 0)


def test_an_arrival_joins_at_the_next_boundary() -> None:
    lone = drive(Case(16, 100, 200, 4, (Job(0, 10, 50),)), jump=True)
    decodes = [lone.first[0] + sum(1010 + 3 * (10 + i) for i in range(k)) for k in range(4)]
    for arrival, start in ((decodes[1], decodes[1]), (decodes[1] + 1, decodes[2]), (decodes[2] - 1, decodes[2])):
        told = drive(Case(16, 100, 200, 4, (Job(0, 10, 50), Job(arrival, 20, 2))), jump=True)
        held = 10 + decodes.index(start)
        assert told.first[1] == start + Plain().mixed(1, held, [(20, 0)])


def test_arrivals_of_one_instant_share_an_iteration() -> None:
    told = drive(Case(16, 100, 200, 4, (Job(5, 10, 3), Job(5, 20, 3))), jump=True)
    assert told.first[0] == told.first[1] == 5 + Plain().mixed(0, 0, [(10, 0), (20, 0)])


def test_a_group_computes_its_prompt_once() -> None:
    """Three members with the same 8 full blocks: the first computes 130 tokens, the others find 128 at once."""
    jobs = tuple(Job(0, 130, 2, ((1, 8),)) for _ in range(3))
    told = drive(Case(16, 100, 200, 4, jobs), jump=True)
    assert [told.end[i][3] for i in range(3)] == [0, 128, 128]  # type: ignore[index]
    assert told.totals[2] == 130 + 2 + 2


def test_a_preempted_request_computes_everything_again_and_loses_no_token() -> None:
    """Capacity 6 blocks of 4: two requests of 8 + 8 tokens need 4 each. The younger gives way once."""
    told = drive(Case(4, 6, 50, 2, (Job(0, 8, 8), Job(0, 8, 8))), jump=True)
    ends = [told.end[0], told.end[1]]
    assert [end[1:3] for end in ends if end is not None] == [(8, 0), (8, 1)]
    assert told.totals[2] > 16


def test_a_request_larger_than_memory_is_refused() -> None:
    instance = Instance(Plain(), Shape(block=16, capacity=10, budget=100, seats=4))
    with pytest.raises(ForgeError, match="100 \\+ 61 tokens take 11 KV blocks, more than the 10"):
        instance.check(Request("r", 100, 61))
    with pytest.raises(ForgeError, match="budget = 4: must exceed seats = 4"):
        Shape(block=16, capacity=10, budget=4, seats=4)


def test_a_lone_prompt_that_an_answer_left_no_room_begins_again() -> None:
    """Both name chain 1 without blocks of it. The first ends and keeps 2 blocks there, which the second holds too: of 6
    blocks none is left for its next chunk, and nobody else runs. It gives way to itself, and the 2 blocks go."""
    jobs = (Job(0, 4, 5, ((1, 0),), keep=True), Job(0, 20, 1, ((1, 0),)))
    for jump in (True, False):
        told = drive(Case(4, 6, 5, 4, jobs), jump=jump)
        assert [told.end[i][1:3] for i in range(2)] == [(5, 0), (1, 1)]  # type: ignore[index]
        assert (told.totals[4], told.stored) == (2, {})
