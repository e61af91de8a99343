"""The agent side's shared processor: who comes together leaves together."""

from __future__ import annotations

import simpy
from hypothesis import given
from hypothesis import strategies as st

from sim.clock import FS
from sim.core import Core, Shared


def leave(arrivals: list[int], work: int) -> list[int]:
    shared, left = Shared(work), []
    for at in [*sorted(arrivals), None]:
        while (due := shared.due()) is not None and (at is None or due <= at):
            shared.take()
            left.append(due)
        if at is not None:
            shared.add(at)
    return left


def test_alone_a_job_takes_its_work() -> None:
    assert leave([0, 100], 10) == [10, 110]


def test_two_jobs_slow_each_other_down() -> None:
    """At 5 the first has 5 to go, at half the speed until 15; the second then has 5 to go alone."""
    assert leave([0, 5], 10) == [15, 20]


def test_a_burst_leaves_as_one() -> None:
    assert leave([0] * 192, 6) == [192 * 6] * 192


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12), st.integers(1, 60))
def test_as_by_small_shares_in_turn(arrivals: list[int], work: int) -> None:
    """Against time cut into steps, each divided among those present, to what rounding may do to either."""
    arrivals = sorted(arrivals)
    fine = 50
    needed, at, ends = dict.fromkeys(range(len(arrivals)), float(work)), 0.0, [0.0] * len(arrivals)
    while needed:
        here = [i for i in needed if arrivals[i] <= at]
        at += 1 / fine
        for i in here:
            needed[i] -= 1 / fine / len(here)
            if needed[i] <= 1e-9:
                ends[i] = at
                del needed[i]
    slack = len(arrivals) * (len(arrivals) + 2)
    assert all(abs(a - b) <= slack for a, b in zip(leave(arrivals, work), sorted(ends), strict=True))


def test_half_comes_before_a_request_and_half_after_its_answer() -> None:
    env = simpy.Environment()
    core, seen = Core(env, work_s=0.01, latency_s=0.002), []
    core.before(lambda: seen.append(("sent", env.now)))
    env.run()
    core.after(lambda: seen.append(("read", env.now)))
    env.run()
    assert seen == [("sent", 7 * FS // 1000), ("read", 12 * FS // 1000)]
