"""The instance against a second model of it, written from its contract alone and stepped block by block."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine_oracle import OracleInstance, OracleReport, OracleRequest, OracleResult
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_driver import MODES, Case, Job, Plain, Told, cases, drive, hanging

#: Set it to thousands after a change of the engine.
EXAMPLES = int(os.environ.get("FORGE_EXAMPLES", "150"))


def cost(decodes: int, context: int, chunks: Sequence[tuple[int, int]]) -> int:
    return Plain().mixed(decodes, context, chunks) if chunks else line(decodes, context)


def line(decodes: int, context: int) -> int:
    a, b, _ = Plain().line(decodes)
    return a + b * context


def judged(case: Case) -> OracleResult:
    """What is cancelled stores nothing under `keep`, says the contract. The oracle lets one whose last token comes at
    that boundary have completed first; it is asked as if such a request had never had `keep`."""
    while True:
        result = stepped(case)
        late = {i for i, job in enumerate(case.jobs) if job.keep and _completes_cancelled(job, result.requests[i])}
        if not late:
            return result
        case = replace(
            case, jobs=tuple(replace(job, keep=job.keep and i not in late) for i, job in enumerate(case.jobs))
        )


def _completes_cancelled(job: Job, report: OracleReport) -> bool:
    ended = report.end is not None and report.sampled == job.output
    return ended and job.cancel is not None and job.arrival + job.cancel <= (report.end or 0)


def stepped(case: Case) -> OracleResult:
    oracle = OracleInstance(case.block, case.capacity, case.budget, case.seats, cost)
    return oracle.run(
        [OracleRequest(i, job.arrival, job.prompt, job.output, job.path, job.keep) for i, job in enumerate(case.jobs)],
        [(when, i + 1, duration, mode) for i, (when, duration, mode) in enumerate(case.loads)],
        [(job.arrival + job.cancel, i) for i, job in enumerate(case.jobs) if job.cancel is not None],
        [(when, one) for when, chain in case.forgets for one in hanging(case, chain)],
    )


def as_told(told: Told, case: Case) -> dict[str, Any]:
    busy, iterations, prefilled, sampled, evicted = told.totals
    ends = {i: end or (case.jobs[i].arrival + (case.jobs[i].cancel or 0),) for i, end in told.end.items()}
    return {
        "first": told.first,
        "end": {i: end if len(end) == 1 else (*end[:3], end[3] or 0) for i, end in ends.items()},
        "totals": (busy, iterations, prefilled, sampled, evicted),
        "stored": told.stored,
    }


def as_judged(result: OracleResult, told: Told) -> dict[str, Any]:
    """One that was cancelled while it waited is compared by its end alone."""
    reports = result.requests
    first = {i: one.first_token for i, one in reports.items() if one.first_token is not None}
    sampled = result.decode_tokens + len(first)
    return {
        "first": first,
        "end": {
            i: (one.end,) if told.end[i] is None else (one.end, one.sampled, one.preemptions, one.hit_tokens)
            for i, one in reports.items()
        },
        "totals": (result.busy, result.iterations, result.prefill_tokens, sampled, result.evicted_blocks),
        "stored": result.stored,
    }


def agree(case: Case) -> None:
    told, result = drive(case, jump=True), judged(case)
    assert as_told(told, case) == as_judged(result, told)


@given(cases())
@settings(max_examples=EXAMPLES, deadline=None)
def test_the_instance_does_what_its_contract_says(case: Case) -> None:
    agree(case)


@given(cases(disturbed=False))
@settings(max_examples=EXAMPLES, deadline=None)
def test_undisturbed_too(case: Case) -> None:
    agree(case)


def test_cancelled_in_its_last_iteration_it_stores_nothing() -> None:
    """Found by the tests here: prompt of one block, an answer of 7 more, cancelled while the last token is sampled."""
    case = Case(1, 12, 2, 1, (Job(0, 1, 8, ((1, 1), (10, 0)), keep=True, cancel=7144),))
    assert drive(case, jump=True).stored == {1: 1}
    assert stepped(case).stored == {1: 1, 10: 7}  # the oracle's choice
    agree(case)


@st.composite
def trees(draw: st.DrawFn) -> Case:
    """Paths of up to four chains that fork, long prompts in many chunks, long answers, crowded memory."""
    block, capacity, seats = draw(st.sampled_from([1, 4, 16])), draw(st.integers(20, 80)), draw(st.integers(1, 5))
    sizes = [draw(st.integers(1, 6)) for _ in range(3)]
    grown: dict[int, int] = {}
    jobs, now = [], 0
    for _ in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0, 0, 900, 30_000]))
        output = draw(st.sampled_from([1, 2, 7, 40, 90]))
        branch = draw(st.lists(st.integers(0, 1), max_size=3))
        path: list[tuple[int, int]] = [(100, sizes[0])] if branch or draw(st.booleans()) else []
        names = [int("1" + "".join(map(str, branch[:depth]))) for depth in range(len(branch) + 1)]
        path += [(100 + names[depth], sizes[depth]) for depth in (1, 2) if depth <= len(branch)]
        fixed = sum(blocks for _, blocks in path)
        own = 10_000 + 2 * names[-1] + bool(path)
        more = draw(st.integers(0, 12))
        prompt = (fixed + max(more, grown.get(own, 0))) * block + draw(st.integers(0, block - 1))
        if prompt < 1 or -(-(prompt + output) // block) > capacity:
            continue
        keep = draw(st.booleans())
        path.append((own, prompt // block - fixed))
        grown[own] = ((prompt + output - 1) if keep else prompt) // block - fixed
        cancel = draw(st.sampled_from([None, None, 0, 3_000, 50_000]))
        jobs.append(Job(now, prompt, output, tuple(path), keep, cancel))
    times = st.integers(0, 150_000)
    loads = draw(st.lists(st.tuples(times, st.integers(1, 5_000), st.sampled_from(MODES)), max_size=2))
    budget = draw(st.integers(seats + 1, 40))
    named = sorted({chain for job in jobs for chain, _ in job.path})
    forgets = draw(st.lists(st.tuples(times, st.sampled_from(named)), max_size=8)) if named else []
    return Case(block, capacity, budget, seats, tuple(jobs), tuple(sorted(loads)), forgets=tuple(sorted(forgets)))


@given(trees())
@settings(max_examples=EXAMPLES, deadline=None)
def test_forked_paths_too(case: Case) -> None:
    agree(case)
