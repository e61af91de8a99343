"""Advantages: reward-to-go per completion, leave-one-out baseline in the group, the batch's standard deviation.

Formulas of DESIGN section 2, "Rewards". A completion is one action of the agent; t counts a trajectory's completions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class DeadGroupError(ValueError):
    """A group with fewer than two survivors has no baseline. It should have died as `too_few_survivors`."""


def reward_to_go(rewards: Sequence[float], gamma: float = 1.0) -> FloatArray:
    """`R_t = sum_{s >= t} gamma^(s - t) r_s` for the rewards [T] of one trajectory's completions."""
    returns = np.asarray(rewards, dtype=np.float64).copy()
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


def leave_one_out(returns: Sequence[FloatArray]) -> list[FloatArray]:
    """Per member of one group: R_t minus the mean R_t of the other members that reached completion t.

    Where no other member got that far, the others' mean R_0 stands in. Written as a mean of differences, so that
    members with equal returns get exactly 0 and not a rounding residue: exact zeros are what the trainer skips.
    """
    if len(returns) < 2:
        raise DeadGroupError(f"a group needs two survivors to have a baseline; this one has {len(returns)}")
    if any(len(member) == 0 for member in returns):
        raise ValueError("a member without a completion sampled nothing: it is no survivor, drop it first")
    longest = max(len(member) for member in returns)
    table = np.array([np.pad(member, (0, longest - len(member))) for member in returns])
    lengths = np.array([len(member) for member in returns])
    advantages = []
    for i, own in enumerate(returns):
        others = np.delete(table, i, axis=0)
        reached = np.arange(len(own)) < np.delete(lengths, i)[:, None]
        count = reached.sum(axis=0)
        at_t = np.where(reached, own - others[:, : len(own)], 0.0).sum(axis=0) / np.maximum(count, 1)
        at_0 = (own - others[:, :1]).mean(axis=0)
        advantages.append(np.where(count > 0, at_t, at_0))
    return advantages


def batch_advantages(
    groups: Sequence[Sequence[Sequence[float]]], *, gamma: float = 1.0, eps: float = 1e-4
) -> list[list[FloatArray]]:
    """Advantages of an optimiser batch, same nesting as `groups[group][member][t]`, the reward of completion t.

    The raw advantages are divided by `std + eps`, std being their population standard deviation over all completions
    of the batch, zero-variance groups included. One scale per batch, not per group, so that an easy group with one
    failure in sixteen does not shout. A zero-variance group, and a batch of nothing else, gives exact zeros.
    """
    raw = [leave_one_out([reward_to_go(member, gamma) for member in group]) for group in groups]
    flat = [member for group in raw for member in group]
    scale = np.concatenate(flat).std() + eps if flat else 1.0
    return [[member / scale for member in group] for group in raw]
