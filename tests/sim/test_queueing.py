"""Queueing laws of the served world: instances so plain that theory says what must come out, and what holds of all.

With one seat and iterations of one length whatever they compute, a request of n tokens is served for n iterations, so
an instance is a single server, first come first served. Poisson arrivals then make it M/G/1, whose mean wait is
lambda E[S^2] / (2 (1 - rho)) (Pollaczek and Khinchine).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

import numpy as np
import pytest

from forge.policies.router import LeastLoaded, RoundRobin, Router
from forge.sections_agents import AgentDomain
from sim.clock import to_fs
from sim.engine import Instance, Shape
from sim.iteration import LineTimes
from sim.serve import Loop, Row, Serving
from sim.sessions import Session, Step
from sim.synthetic import Agents
from sim.traces.reading import Recorded

STEP_FS = 10**12  # a millisecond an iteration
STEP_S = 1e-3
MEAN = 200.0  # tokens of an answer
BATCHES = 20
CONSTANT = LineTimes(step_s=STEP_S, row_s=0.0, prefill_token_s=0.0)


def poisson(outputs: np.ndarray, rho: float, seed: int, servers: int = 1) -> Recorded:
    """One request a session; `rho` is the load of each server."""
    rng = np.random.default_rng((seed, 1))
    gap_s = float(outputs.mean()) * STEP_S / (rho * servers)
    starts = np.cumsum(rng.exponential(gap_s, len(outputs))).tolist()
    steps = [Step(prompt=1, output=n) for n in outputs.tolist()]
    return Recorded(16, tuple(Session(name=str(i), start_s=t, steps=(steps[i],)) for i, t in enumerate(starts)))


def outputs_of(law: str, count: int, seed: int) -> np.ndarray:
    """Whole tokens with a mean of about `MEAN`."""
    rng = np.random.default_rng((seed, 2))
    drawn = {
        "deterministic": lambda: np.full(count, MEAN),
        "exponential": lambda: rng.exponential(MEAN, count),
        "hyperexponential": lambda: rng.exponential(np.where(rng.random(count) < 0.9, MEAN / 2, MEAN * 5.5), count),
        "uniform": lambda: rng.uniform(1, 2 * MEAN, count),
    }[law]()
    return np.maximum(np.ceil(drawn), 1).astype(np.int64)


def served(trace: Recorded, *, instances: int = 1, seats: int = 1, router: Router | None = None, **options: object):
    shape = Shape(capacity=10_000, budget=4096, seats=seats)
    made = [Instance(CONSTANT, shape) for _ in range(instances)]
    rows = Serving(trace, made, router or RoundRobin(), **options).run()  # type: ignore[arg-type]
    return sorted(rows, key=lambda row: (row.session, row.step))


def waits(rows: Sequence[Row]) -> list[float]:
    """Seconds from arrival to service: the sojourn without the answer's iterations."""
    return [(row.ended - row.arrived - row.output * STEP_FS) / 1e15 for row in rows]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error by batch means: successive waits are not independent."""
    size = len(values) // BATCHES
    means = [fmean(values[i * size : (i + 1) * size]) for i in range(BATCHES)]
    return fmean(values), stdev(means) / sqrt(BATCHES)


# --- theory ------


@pytest.mark.parametrize("rho", [0.3, 0.7])
@pytest.mark.parametrize("law", ["deterministic", "exponential", "hyperexponential", "uniform"])
def test_mean_wait_is_pollaczek_and_khinchines(law: str, rho: float) -> None:
    """M/D/1, M/M/1 (for which it is rho S / (1 - rho)) and M/G/1. Within 3 standard errors, which are small."""
    count = 12_000
    outputs = outputs_of(law, count, seed=1)
    rows = served(poisson(outputs, rho, seed=1))
    span_s = (rows[-1].arrived - rows[0].arrived) / 1e15
    rate, seconds = (count - 1) / span_s, outputs * STEP_S
    expected = rate * float((seconds**2).mean()) / (2 * (1 - rate * float(seconds.mean())))
    mean, error = interval(waits(rows))
    assert abs(mean - expected) < max(3 * error, 0.03 * expected)
    assert error < 0.15 * expected


def test_first_come_first_served_is_lindleys_recursion_to_the_femtosecond() -> None:
    rows = served(poisson(outputs_of("hyperexponential", 3000, seed=2), 0.8, seed=2))
    free = 0
    for row in rows:
        free = max(free, row.arrived) + row.output * STEP_FS
        assert row.ended == free
        assert row.first == free - (row.output - 1) * STEP_FS


def test_two_servers_wait_less_than_two_queues() -> None:
    """Erlang C for M/M/2: the mean wait is S rho^2 / (1 - rho^2). One instance with two seats is one queue; two
    instances taken in turn are two."""
    rho, outputs = 0.7, outputs_of("exponential", 10_000, seed=3)
    trace = poisson(outputs, rho, seed=3, servers=2)
    together, apart = served(trace, seats=2), served(trace, instances=2)
    expected = float(outputs.mean()) * STEP_S * rho**2 / (1 - rho**2)
    mean, error = interval(waits(together))
    # An arrival may wait for the end of the other's iteration: half of one on average, where the other seat is taken.
    assert abs(mean - expected - rho * STEP_S / 2) < max(3 * error, 0.03 * expected)
    assert fmean(waits(apart)) > 1.3 * mean


def test_seats_for_all_make_nobody_wait() -> None:
    """M/G/infinity: the mean number under way is the load, whatever the law (here exact but for the iteration under
    way on arrival)."""
    outputs = outputs_of("hyperexponential", 5000, seed=4)
    rows = served(poisson(outputs, 8.0, seed=4), seats=500)
    assert all(0 <= wait < STEP_S for wait in waits(rows))


# --- what holds of everything ------

AGENT = AgentDomain.model_validate(
    {
        "calls": {"median": 4, "sigma": 0.6, "cap": 10},
        "system_tokens": 200,
        "task_tokens": {"median": 60, "sigma": 0.5, "cap": 200},
        "output_tokens": {"median": 40, "sigma": 0.8, "cap": 400},
        "result_tokens": {"median": 50, "sigma": 1.0, "cap": 800},
        "tool_wait": {"median": 0.2, "sigma": 1.0, "cap": 5.0},
        "sub_agents": {"rate": 0.2, "most": 3, "calls": {"median": 2, "cap": 4}, "system_tokens": 100},
        "context": {"limit_tokens": 6000, "reserve_tokens": 500, "summary_tokens": 100},
    }
)


def agents(items: int, seed: int) -> Recorded:
    """Every member of an item is a session; items arrive 0.3 s apart."""
    work = Agents({"a": AGENT}, seed=seed, group=3, block=16)
    made = []
    for index in range(items):
        for number, member in enumerate(work.item(index).members):
            made.append(Session(name=f"{index}.{number}", start_s=0.3 * index, steps=member.steps))
    return Recorded(16, tuple(made))


def agents_served(trace: Recorded, loop: Loop, capacity: int = 1500) -> list[Row]:
    times = LineTimes(step_s=2e-3, row_s=1e-4, prefill_token_s=1e-5)
    made = [Instance(times, Shape(capacity=capacity, budget=512, seats=16), listen=True) for _ in range(2)]
    return Serving(trace, made, LeastLoaded(), loop=loop, seed=7).run()


@pytest.fixture(scope="module", params=[None, 8], ids=["open", "closed"])
def run(request: pytest.FixtureRequest) -> tuple[Recorded, list[Row]]:
    trace = agents(30, seed=5)
    return trace, agents_served(trace, Loop(concurrency=request.param))


def test_littles_law_is_exact(run: tuple[Recorded, list[Row]]) -> None:
    """The integral of the number in flight is the sum of the sojourns; so the time average is rate times mean."""
    _, rows = run
    changes = sorted([(row.arrived, 1) for row in rows] + [(row.ended, -1) for row in rows])
    area, under_way = 0, 0
    for (at, change), (later, _) in pairwise(changes):
        under_way += change
        assert under_way >= 0
        area += under_way * (later - at)
    assert area == sum(row.ended - row.arrived for row in rows)
    assert area > 0


def test_every_step_is_served_once_with_its_tokens(run: tuple[Recorded, list[Row]]) -> None:
    trace, rows = run
    steps = {(n, k): step for n, session in enumerate(trace.recorded) for k, step in enumerate(session.steps)}
    assert sorted((row.session, row.step) for row in rows) == sorted(steps)
    assert sum(row.prompt for row in rows) == sum(step.prompt for step in steps.values())
    assert sum(row.output for row in rows) == sum(step.output for step in steps.values())
    for row in rows:
        step = steps[row.session, row.step]
        assert (row.prompt, row.output) == (step.prompt, step.output)
        assert row.hit <= min(step.prompt - 1, 16 * sum(blocks for _, blocks in step.path))


def test_nothing_happens_before_what_it_waits_for(run: tuple[Recorded, list[Row]]) -> None:
    """A step is sent exactly its delay after the last answer it waits for."""
    trace, rows = run
    ends = {(row.session, row.step): row.ended for row in rows}
    sent = 0
    for row in rows:
        step = trace.recorded[row.session].steps[row.step]
        assert row.arrived < row.first <= row.ended
        if step.after:
            sent += 1
            assert row.arrived == max(ends[row.session, before] for before in step.after) + to_fs(step.delay_s)
    assert sent > 100


def test_a_closed_loop_keeps_its_sessions_under_way() -> None:
    trace = agents(30, seed=5)
    rows = agents_served(trace, Loop(concurrency=8))
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    for row in rows:
        begins[row.session] = min(row.arrived, begins.get(row.session, row.arrived))
        ends[row.session] = max(row.ended, ends.get(row.session, 0))
    for session, begin in begins.items():
        others = sum(begins[s] <= begin < ends[s] for s in begins)
        assert others <= 8
        assert session < 8 or begin in ends.values()


def test_a_run_is_its_seeds() -> None:
    trace = agents(12, seed=6)
    first = agents_served(trace, Loop())
    assert first == agents_served(agents(12, seed=6), Loop())
    assert first != agents_served(agents(12, seed=8), Loop())


def test_memory_pressure_loses_nothing() -> None:
    trace = agents(20, seed=9)
    rows = agents_served(trace, Loop(concurrency=60), capacity=380)
    assert sum(row.preemptions for row in rows) > 0
    assert sum(row.output for row in rows) == sum(step.output for s in trace.recorded for step in s.steps)
