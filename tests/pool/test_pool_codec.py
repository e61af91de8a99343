from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_support import trajectory

from forge.pool import codec
from forge.types import Completion, DeathReason, Outcome, Trajectory

IDS = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 300), max_size=12).map(tuple)
FLOATS = st.floats(allow_nan=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    sampled = draw(IDS)
    n = len(sampled)
    width = draw(st.sampled_from([32, 64]))
    return Completion(
        trajectory=draw(st.text()),
        index=draw(st.integers(0)),
        prompt_ids=draw(IDS),
        sampled_ids=sampled,
        logprobs=tuple(draw(st.lists(st.floats(allow_nan=False, width=width), min_size=n, max_size=n))),
        versions=tuple(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))),
        finish=draw(st.text()),
        temperature=draw(FLOATS),
        received_s=draw(FLOATS),
        first_token_s=draw(FLOATS),
        finished_s=draw(FLOATS),
        instance=draw(st.integers()),
    )


@given(
    st.lists(completions(), max_size=4).map(tuple),
    st.text(),
    st.none() | FLOATS,
    st.none() | st.sampled_from(list(DeathReason)),
)
def test_every_field_reads_back_exactly(
    parts: tuple[Completion, ...], name: str, reward: float | None, reason: DeathReason | None
) -> None:
    outcome = Outcome(trajectory=name, reward=reward, reason=reason, detail=name)
    given_one = Trajectory(id=name, position=3, member=1, completions=parts, outcome=outcome)
    read = codec.decode(codec.encode(given_one))
    assert read == given_one
    assert repr(read) == repr(given_one)  # also -0.0 and the types


def test_logprobs_that_are_no_numbers_survive() -> None:
    one = trajectory(0, 0, turns=1)
    odd = replace(one, completions=(replace(one.completions[0], logprobs=(-math.inf, math.nan, -0.0)),))
    assert repr(codec.decode(codec.encode(odd)).completions) == repr(odd.completions)


def test_a_conversation_takes_the_room_of_its_last_turn() -> None:
    one = trajectory(0, 0, turns=60, sampled=20)
    tokens = sum(len(c.prompt_ids) for c in one.completions)
    assert tokens > 30_000
    assert len(codec.encode(one)) < 30_000 - 8_000


def test_float32_logprobs_take_half_the_room() -> None:
    one = trajectory(0, 0, turns=1, sampled=2_000)
    narrow = tuple(np.array(one.completions[0].logprobs, "f4").astype(float).tolist())
    smaller = replace(one, completions=(replace(one.completions[0], logprobs=narrow),))
    assert len(codec.encode(one)) - len(codec.encode(smaller)) == pytest.approx(8_000, rel=0.01)


@given(IDS, IDS)
def test_shared_prefix_is_the_longest(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    n = codec.shared_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]
