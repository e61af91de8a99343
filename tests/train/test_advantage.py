"""Advantages against brute force in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.train.advantage import DeadGroupError, batch_advantages, leave_one_out, reward_to_go

rewards = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=5)
groups = st.lists(rewards, min_size=2, max_size=5)
gammas = st.sampled_from([1.0, 0.5, 0.25, 0.0])


def brute_returns(member: list[float], gamma: float) -> list[Fraction]:
    return [
        sum((Fraction(gamma) ** (s - t) * Fraction(member[s]) for s in range(t, len(member))), Fraction(0))
        for t in range(len(member))
    ]


def brute_leave_one_out(group: list[list[float]], gamma: float) -> list[list[Fraction]]:
    returns = [brute_returns(member, gamma) for member in group]
    advantages = []
    for i, own in enumerate(returns):
        others = [member for j, member in enumerate(returns) if j != i]
        row = []
        for t, value in enumerate(own):
            reached = [member[t] for member in others if len(member) > t] or [member[0] for member in others]
            row.append(value - sum(reached, Fraction(0)) / len(reached))
        advantages.append(row)
    return advantages


@settings(max_examples=60, deadline=None)
@given(rewards, gammas)
def test_reward_to_go(member: list[float], gamma: float) -> None:
    assert reward_to_go(member, gamma).tolist() == [float(x) for x in brute_returns(member, gamma)]


@settings(max_examples=60, deadline=None)
@given(st.lists(groups, min_size=1, max_size=4), gammas)
def test_batch_advantages(batch: list[list[list[float]]], gamma: float) -> None:
    raw = [brute_leave_one_out(group, gamma) for group in batch]
    flat = np.array([float(x) for group in raw for member in group for x in member])
    found = batch_advantages(batch, gamma=gamma, eps=0.01)
    assert [[len(member) for member in group] for group in found] == [[len(m) for m in group] for group in batch]
    got = np.concatenate([member for group in found for member in group])
    np.testing.assert_allclose(got * (flat.std() + 0.01), flat, rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e3, 1e3), st.lists(st.integers(1, 6), min_size=2, max_size=8))
def test_zero_variance_groups_give_exact_zeros(reward: float, lengths: list[int]) -> None:
    """Exact, not nearly: a residue divided by a tiny deviation would be trained on."""
    equal = [[0.0] * (n - 1) + [reward] for n in lengths]
    mixed = [[0.0], [1.0]]
    alone = batch_advantages([equal])
    beside = batch_advantages([mixed, equal])[1]
    assert not any(member.any() for member in [*alone[0], *beside])


def test_worked_example() -> None:
    # Three members of 1, 2 and 3 completions, outcomes 1, 0, 1. At t = 1 only members 1 and 2 are left to compare;
    # at t = 2 member 2 is alone, and the others' R_0 (1 and 0) stand in.
    returns = [reward_to_go(member) for member in ([1.0], [0.0, 0.0], [0.0, 0.0, 1.0])]
    advantages = [member.tolist() for member in leave_one_out(returns)]
    assert advantages == [[0.5], [-1.0, -1.0], [0.5, 1.0, 0.5]]


@pytest.mark.parametrize("group", [[], [[1.0]]], ids=["none", "one"])
def test_a_group_without_a_baseline_is_refused(group: list[list[float]]) -> None:
    with pytest.raises(DeadGroupError, match=f"has {len(group)}"):
        batch_advantages([[[0.0], [1.0]], group])


def test_a_member_without_completions_is_refused() -> None:
    with pytest.raises(ValueError, match="without a completion"):
        batch_advantages([[[0.0], []]])
