"""CISPO against a formula worked out by hand through the softmax, and the faults seen in other frameworks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from forge.train.cispo import CispoConfig, EmptyBatchError, cispo_loss, denominators, ratio_stats

LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor, "Tensor | float", CispoConfig], Tensor]


@dataclass(frozen=True)
class Case:
    """`logits` [B, T, V] and what goes with them [B, T], all in double precision."""

    logits: np.ndarray
    tokens: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    mask: np.ndarray


def case(seed: int, spread: float = 1.5) -> Case:
    rng = np.random.default_rng(seed)
    batch, length, vocabulary = 3, 5, 7
    logits = rng.normal(0.0, 2.0, (batch, length, vocabulary))
    tokens = rng.integers(0, vocabulary, (batch, length))
    logprobs = np.take_along_axis(log_softmax(logits), tokens[..., None], -1)[..., 0]
    mask = rng.random((batch, length)) < 0.6
    mask[0, 0], mask[2] = True, False
    return Case(
        logits=logits,
        tokens=tokens,
        rollout=logprobs + rng.normal(0.0, spread, (batch, length)),
        advantages=rng.normal(0.0, 1.0, (batch, length)),
        mask=mask,
    )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def by_hand(c: Case, denominator: float, config: CispoConfig) -> tuple[float, np.ndarray]:
    """Loss and its gradient by the logits, token by token: d log softmax(z)[o] / dz = onehot(o) - softmax(z)."""
    loss, gradient = 0.0, np.zeros_like(c.logits)
    for b, t in np.argwhere(c.mask):
        logprobs = log_softmax(c.logits[b, t])
        token = c.tokens[b, t]
        ratio = math.exp(logprobs[token] - c.rollout[b, t])
        weight = min(max(ratio, 1.0 - config.e_low), 1.0 + config.e_high)
        factor = -weight * c.advantages[b, t] / denominator
        loss += factor * logprobs[token]
        gradient[b, t] = factor * (np.eye(len(logprobs))[token] - np.exp(logprobs))
    return loss, gradient


def by_torch(function: LossFunction, c: Case, denominator: float, config: CispoConfig) -> tuple[float, np.ndarray]:
    logits = torch.tensor(c.logits, requires_grad=True)
    logprobs = torch.log_softmax(logits, -1).gather(-1, torch.tensor(c.tokens)[..., None])[..., 0]
    rest = (torch.tensor(c.rollout), torch.tensor(c.advantages), torch.tensor(c.mask))
    loss = function(logprobs, *rest, denominator, config)
    if not loss.requires_grad:
        return float(loss), np.zeros_like(c.logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient.numpy()


def agrees(function: LossFunction, c: Case, config: CispoConfig) -> bool:
    denominator = float(c.mask.sum())
    loss, gradient = by_torch(function, c, denominator, config)
    expected_loss, expected = by_hand(c, denominator, config)
    same_loss = math.isclose(loss, expected_loss, rel_tol=1e-12, abs_tol=1e-13)
    return same_loss and bool(np.allclose(gradient, expected, rtol=1e-12, atol=1e-14))


CONFIGS = [CispoConfig(), CispoConfig(e_low=0.2, e_high=0.2), CispoConfig(e_low=0.5, e_high=0.0)]


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "verl", "low-cap"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_the_hand_formula(config: CispoConfig, seed: int) -> None:
    assert agrees(cispo_loss, case(seed), config)


def without_log_pi(new, old, advantages, mask, denominator, config):  # type: ignore[no-untyped-def]
    weight = (new.detach() - old).exp().clamp(1 - config.e_low, 1 + config.e_high)
    return -(weight * advantages * mask).sum() / denominator


def counting_masked(new, old, advantages, mask, denominator, config):  # type: ignore[no-untyped-def]
    return cispo_loss(new, old, advantages, torch.ones_like(mask), denominator, config)


def denominator_of_all_tokens(new, old, advantages, mask, _, config):  # type: ignore[no-untyped-def]
    return cispo_loss(new, old, advantages, mask, float(mask.numel()), config)


def ratio_not_detached(new, old, advantages, mask, denominator, config):  # type: ignore[no-untyped-def]
    weight = (new - old).exp().clamp(1 - config.e_low, 1 + config.e_high)
    return -(weight * advantages * new * mask).sum() / denominator


def ppo_clip(new, old, advantages, mask, denominator, config):  # type: ignore[no-untyped-def]
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - config.e_low, 1 + config.e_high)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * mask).sum() / denominator


@pytest.mark.parametrize(
    "wrong",
    [without_log_pi, counting_masked, denominator_of_all_tokens, ratio_not_detached, ppo_clip],
    ids=lambda f: f.__name__,
)
def test_known_faults_are_caught(wrong: LossFunction) -> None:
    assert not any(agrees(wrong, case(seed), CispoConfig()) for seed in range(5))


def test_without_log_pi_the_gradient_is_zero() -> None:
    _, gradient = by_torch(without_log_pi, case(0), 1.0, CispoConfig())
    assert not gradient.any()


def test_clipped_tokens_keep_their_gradient() -> None:
    c = case(1, spread=0.0)
    c = Case(logits=c.logits, tokens=c.tokens, rollout=c.rollout - 9.0, advantages=c.advantages, mask=c.mask)
    _, gradient = by_torch(cispo_loss, c, 1.0, CispoConfig(e_high=0.5))
    assert (np.abs(gradient).sum(-1)[c.mask] > 0).all()


def test_junk_behind_the_mask_is_never_read() -> None:
    junk = torch.tensor([0.0, math.nan, math.inf, -math.inf])
    new = torch.tensor([-1.0, -math.inf, math.nan, -2.0], requires_grad=True)
    mask = torch.tensor([True, False, False, False])
    loss = cispo_loss(new, torch.where(mask, -1.0, junk), torch.where(mask, 2.0, junk), mask, 1.0, CispoConfig())
    loss.backward()
    assert loss.item() == 2.0
    assert new.grad is not None
    assert new.grad.tolist() == [-2.0, 0.0, 0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e4, 0.0), st.floats(-1e4, 0.0), st.floats(-10.0, 10.0))
def test_no_logprob_overflows(new: float, old: float, advantage: float) -> None:
    logprob = torch.tensor([new], requires_grad=True)
    on = torch.tensor([True])
    loss = cispo_loss(logprob, torch.tensor([old]), torch.tensor([advantage]), on, 1.0, CispoConfig())
    loss.backward()
    assert math.isfinite(loss.item())
    assert logprob.grad is not None
    assert abs(logprob.grad.item()) <= 5.0 * abs(advantage) * (1 + 1e-6)


def test_denominators() -> None:
    assert denominators([3, 1, 0, 4], [7, 7, 8, 9], "tokens") == [8.0] * 4
    # Groups 7 and 9 have 4 tokens each; group 8 has none and is not averaged over.
    assert denominators([3, 1, 0, 4], [7, 7, 8, 9], "group") == [8.0, 8.0, 2.0, 8.0]
    assert denominators([3, 1, 2], [7, 7, 9], "group") == [8.0, 8.0, 4.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1))
def test_weights_of_a_batch_sum_to_one(samples: list[tuple[int, int]]) -> None:
    counts, groups = zip(*samples, strict=True)
    for normalise in ("tokens", "group"):
        if sum(counts):
            per_sample = denominators(counts, groups, normalise)
            assert sum(n / d for n, d in zip(counts, per_sample, strict=True)) == pytest.approx(1.0)
        else:
            with pytest.raises(EmptyBatchError, match="loss token"):
                denominators(counts, groups, normalise)


def test_ratio_stats() -> None:
    old = torch.tensor([[-1.0, -2.0, -3.0]], dtype=torch.float64)
    new = old + torch.tensor([[math.log(2.0), math.log(6.0), 50.0]], dtype=torch.float64)
    stats = ratio_stats(new, old, torch.tensor([[True, True, False]]), CispoConfig())
    assert stats.mean == pytest.approx(4.0)
    assert stats.max == pytest.approx(6.0)
    assert stats.clipped_share == 0.5
    assert stats.kl == pytest.approx((1.0 - math.log(2.0) + 5.0 - math.log(6.0)) / 2)
    assert stats.logprob_gap == pytest.approx((math.log(2.0) + math.log(6.0)) / 2)
    with pytest.raises(EmptyBatchError):
        ratio_stats(new, old, torch.zeros_like(new, dtype=torch.bool), CispoConfig())


@pytest.mark.parametrize("field", [{"e_low": 1.5}, {"e_high": -0.1}, {"normalise": "sequence"}])
def test_bad_configuration_is_refused(field: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        CispoConfig(**field)  # type: ignore[arg-type]
