"""Speculation: what a step yields and costs, where it stops paying, and that jumps still end where stepping does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import instance_driver
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instance_driver import Case, Job, Plain, cases, drive

from forge.cost import CostModel, Deployment, hardware, model_card
from forge.policies.speculation import CostAware, Fixed, Off, Speculation
from forge.types import ForgeError
from sim.engine import Instance, Load, Shape
from sim.iteration import RooflineTimes
from sim.request import Request
from sim.speculation import UNIT, Head, SpeculativeTimes

chances = st.lists(st.floats(0, 1), min_size=1, max_size=6).map(tuple)
SKYRL = (0.886, 0.770, 0.663)  # of the field: acceptance by depth of a head that follows


def on_h200(head: Head, policy: Speculation | None = None, tp: int = 4) -> tuple[SpeculativeTimes, RooflineTimes]:
    times = RooflineTimes(CostModel(Deployment(model=model_card("qwen3_32b"), hardware=hardware("h200_sxm"), tp=tp)))
    return SpeculativeTimes(times, head, policy or CostAware()), times


def tokens_per_s(times: Any, rows: int, context: int) -> float:
    """Of one row, with `context` tokens each."""
    a, b, gain = times.line(rows)
    return gain / times.unit / (a + b * rows * context * times.unit)


# --- what a step yields ------


@given(chances, st.integers(0, 6))
def test_expected_tokens_are_the_mean_of_drafts_accepted_in_a_row(acceptance: tuple[float, ...], depth: int) -> None:
    depth = min(depth, len(acceptance))
    drawn = np.random.default_rng(0).random((20_000, len(acceptance))) < np.array(acceptance)
    mean = 1 + np.cumprod(drawn[:, :depth], axis=1).sum(axis=1).mean() if depth else 1.0
    assert Head(acceptance=acceptance).tokens(depth, 0) == pytest.approx(mean, abs=0.06)


@given(st.floats(0, 0.99), st.integers(1, 8))
def test_of_one_acceptance_it_is_the_closed_form(a: float, k: int) -> None:
    assert Head(acceptance=(a,) * k).tokens(k, 0) == pytest.approx((1 - a ** (k + 1)) / (1 - a))


def test_acceptance_decays_with_the_weights_unless_the_head_follows() -> None:
    frozen = Head(acceptance=SKYRL, drift=0.1)
    assert frozen.tokens(1, 0) == pytest.approx(1.886)
    assert frozen.tokens(1, 5) == pytest.approx(1 + 0.886 * np.exp(-0.5))
    assert replace(frozen, follows=True).tokens(3, 5) == frozen.tokens(3, 0)


# --- what it costs ------


def test_depth_0_is_the_plain_machine() -> None:
    speculative, plain = on_h200(Head(acceptance=(0.9,)), Off())
    for rows in (1, 7, 64):
        (a, b, gain), (one_a, one_b, _) = speculative.line(rows), plain.line(rows)
        assert (a, gain) == (one_a, UNIT)
        assert b * UNIT == pytest.approx(one_b, rel=1e-4)
        chunks = [(500, 20)]
        assert speculative.mixed(rows, 9000 * UNIT, chunks) == plain.mixed(rows, 9000, chunks)


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_head_that_is_never_right_and_drafts_nothing_changes_no_run(case: Case) -> None:
    times = SpeculativeTimes(Scaled(), Head(acceptance=(0.0,)), Off())
    assert _driven(case, times, True).end == _driven(case, Scaled(), True).end


def test_it_pays_at_batch_1_and_loses_in_a_large_batch() -> None:
    """Memory-bound, four more tokens ride along; compute-bound, they cost as much as those of four more rows."""
    speculative, plain = on_h200(Head(acceptance=(0.6,) * 4), Fixed(tokens=4))
    gains = [tokens_per_s(speculative, rows, 300) / tokens_per_s(plain, rows, 300) for rows in (1, 16, 128, 1024)]
    assert gains[0] > 1.5
    assert gains[-1] < 0.9
    assert gains == sorted(gains, reverse=True)


def test_speed_up_is_the_formula_of_the_field() -> None:
    """E T(B, 1) / (T(B, k + 1) + k T_draft)."""
    head = Head(acceptance=SKYRL, draft_share=0.1)
    speculative, plain = on_h200(head, Fixed(tokens=3))
    for rows in (1, 32):
        context = rows * 2000
        a, b, _ = plain.line(rows)
        wide_a, wide_b, _ = plain.line(4 * rows)
        step = wide_a + wide_b * context + 3 * 0.1 * (a + b * context)
        expected = head.tokens(3, 0) * (a + b * context) / step
        found = tokens_per_s(speculative, rows, 2000) / tokens_per_s(plain, rows, 2000)
        assert found == pytest.approx(expected, rel=2e-3)


def test_the_depth_is_chosen_by_rows_and_never_loses() -> None:
    chosen, plain = on_h200(Head(acceptance=(0.6,) * 6, context=300))
    depths = [chosen.depth(rows) for rows in (1, 16, 128, 256, 1024)]
    assert depths[0] >= 3
    assert depths[-1] == 0
    assert depths == sorted(depths, reverse=True)
    for rows in (1, 16, 128, 256, 1024):
        best = tokens_per_s(chosen, rows, 300)
        assert best >= 0.999 * tokens_per_s(plain, rows, 300)
        for tokens in range(1, 7):
            fixed, _ = on_h200(Head(acceptance=(0.6,) * 6), Fixed(tokens=tokens))
            assert best >= 0.999 * tokens_per_s(fixed, rows, 300)


def test_depth_shrinks_as_the_head_falls_behind() -> None:
    times, _ = on_h200(Head(acceptance=(0.8,) * 6, drift=0.2, draft_share=0.1))
    instance = Instance(times, Shape(capacity=100, budget=300))
    times.follow(instance)
    before, line = times.depth(8), times.line(8)
    instance.version = 8
    assert times.depth(8) < before
    assert times.line(8)[2] < line[2]
    instance.version = 0
    assert times.line(8) == line


# --- on an instance ------


class Scaled(Plain):
    """Coefficients that a unit divides."""

    def line(self, rows: int) -> tuple[int, int, int]:
        return 1000 + 10 * rows, 2 * UNIT, 1

    def mixed(self, rows: int, context: int, chunks: Sequence[tuple[int, int]]) -> int:
        return 1000 + 10 * rows + 2 * UNIT * context + sum(20 * new + new * before // 7 for new, before in chunks)


def _driven(case: Case, times: Any, jump: bool) -> instance_driver.Told:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(instance_driver, "Plain", lambda: times)
        return drive(case, jump=jump)


heads = st.builds(
    Head,
    acceptance=st.lists(st.floats(0, 1), min_size=2, max_size=4).map(tuple),
    context=st.integers(0, 50),
)
policies = st.one_of(st.builds(Fixed, tokens=st.integers(1, 2)), st.just(CostAware()), st.just(Off()))


@given(cases(), heads, policies)
@settings(max_examples=150, deadline=None)
def test_jumps_are_steps(case: Case, head: Head, policy: Speculation) -> None:
    times = SpeculativeTimes(Plain(), head, policy)
    case = replace(case, capacity=case.capacity + 4)  # a last step may go 4 tokens beyond the end, see Instance.check
    jumped, stepped = _driven(case, times, True), _driven(case, times, False)
    assert (jumped.first, jumped.end, jumped.seen) == (stepped.first, stepped.end, stepped.seen)
    assert (jumped.totals, jumped.stored) == (stepped.totals, stepped.stored)
    assert jumped.spans <= stepped.spans


FOUND = [
    # who gave way fits again as a prompt; who lacks less than a token has not ended; a look ahead of the first decode
    (
        Case(
            block=2,
            capacity=58,
            budget=60,
            seats=2,
            jobs=(
                Job(5000, 6, 19, ((3, 3), (31, 0)), True),
                Job(5000, 34, 4, ((1, 1), (10, 16))),
                Job(5000, 51, 27, ((1, 1), (10, 24)), True),
                Job(5000, 50, 27, ((1, 1), (11, 24)), False, 7599),
                Job(10000, 39, 28, ((1, 1),)),
            ),
            loads=((847, 2431, "drain"),),
        ),
        Head(acceptance=(0.5716579253237862,)),
        Fixed(tokens=1),
    ),
    (
        Case(
            block=1,
            capacity=22,
            budget=7,
            seats=6,
            jobs=(
                Job(5000, 3, 18, ((1, 1), (10, 2))),
                Job(5000, 3, 10, ((1, 1), (10, 2))),
                Job(5000, 6, 3),
                Job(5000, 10, 6, ((1, 1), (10, 9))),
            ),
        ),
        Head(acceptance=(0.8986,)),
        Fixed(tokens=1),
    ),
    (
        Case(
            block=1,
            capacity=18,
            budget=6,
            seats=5,
            jobs=(
                Job(0, 9, 1, ((3, 3), (30, 6))),
                Job(0, 5, 2),
                Job(0, 1, 1),
                Job(0, 1, 1),
                Job(0, 1, 1, ((1, 1), (10, 0))),
                Job(0, 1, 2),
                *(Job(0, 1, 1) for _ in range(4)),
            ),
        ),
        Head(acceptance=(0.5, 0.0), context=0),
        CostAware(),
    ),
]


@pytest.mark.parametrize(("case", "head", "policy"), FOUND)
def test_jumps_are_steps_where_they_once_were_not(case: Case, head: Head, policy: Speculation) -> None:
    test_jumps_are_steps.hypothesis.inner_test(case, head, policy)


def test_an_answer_takes_as_many_steps_as_its_tokens_need() -> None:
    """2.5 tokens a step: 100 tokens behind the first one are 40 steps."""
    times = SpeculativeTimes(Plain(), Head(acceptance=(0.75, 1.0), draft_share=0.0), Fixed(tokens=2))
    told = _driven(Case(16, 100, 200, 4, (Job(0, 10, 101),)), times, True)
    assert times.line(1)[2] == UNIT * 5 // 2
    assert told.totals[1] == 1 + 40


def test_a_load_changes_the_pace_from_the_instant_it_ends() -> None:
    """30 steps of 2 tokens are planned; from version 1 on nothing is accepted, and a step is a token."""
    times = SpeculativeTimes(Plain(), Head(acceptance=(1.0,), drift=100.0, draft_share=0.0), Fixed(tokens=1))
    instance = Instance(times, Shape(capacity=100, budget=300))
    times.follow(instance)
    instance.add(Request("a", 10, 61), 0)
    for _ in range(2):
        instance.advance(instance.due() or 0)
    assert instance.due() == instance._span.end_of(30)
    instance.load(Load(1, 5, "in_flight"), instance._span.end_of(9) + 1)
    while not instance.ended:
        instance.advance(instance.due() or 0)
    assert instance.usage(1 << 60).iterations == 1 + 10 + 40


def test_a_request_whose_last_step_could_not_fit_is_refused() -> None:
    times = SpeculativeTimes(Plain(), Head(acceptance=(1.0, 1.0)), Fixed(tokens=2))
    instance = Instance(times, Shape(block=1, capacity=20, budget=300))
    instance.check(Request("fits", 10, 8))
    with pytest.raises(ForgeError, match="more than the 20"):
        instance.check(Request("a", 10, 9))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"acceptance": ()}, "acceptance"),
        ({"acceptance": (1.2,)}, "acceptance"),
        ({"acceptance": (0.5,), "drift": -1.0}, "negative"),
    ],
)
def test_impossible_heads_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        Head(**keys)


def test_no_speculation_on_speculation() -> None:
    times, _ = on_h200(Head(acceptance=(0.5,)))
    with pytest.raises(ForgeError, match="plain ones"):
        SpeculativeTimes(times, Head(acceptance=(0.5,)), Off())
