"""The CISPO loss: an importance weight clipped under stop-gradient times log pi. Every token keeps its gradient.

Source: MiniMax-M1 report (arXiv 2506.13585, equations 4 and 5), restated in DESIGN section 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class EmptyBatchError(ValueError):
    """An optimiser batch without a single loss token: its mean is undefined, and silence would hide a lost mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoConfig:
    """`e_low = 1` means no lower bound (a ratio is never below 0); `e_high = 4` caps the weight at 5.

    `normalise`: "tokens" divides by the loss tokens of the optimiser batch, so every token weighs the same; "group"
    divides by the loss tokens of the token's own group and then by the number of groups, so every group does.
    `max_log_ratio` bounds |log ratio| before `exp`: e^20 is far above any sensible cap, and fp32 overflows at 88.
    """

    e_low: float = 1.0
    e_high: float = 4.0
    normalise: Literal["tokens", "group"] = "tokens"
    max_log_ratio: float = 20.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.e_low <= 1.0:
            raise ValueError(f"cispo.e_low = {self.e_low}: must lie in [0, 1]; 1 means no lower bound")
        if self.e_high < 0.0:
            raise ValueError(f"cispo.e_high = {self.e_high}: must not be negative; the weight's cap is 1 + e_high")
        if self.normalise not in ("tokens", "group"):
            raise ValueError(f"cispo.normalise = {self.normalise!r}: must be 'tokens' or 'group'")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStats:
    """How far the trainer's policy is from the one that sampled, over the loss tokens of a batch.

    `kl` estimates KL(rollout || trainer) by k3 = r - 1 - log r (Schulman, "Approximating KL divergence"), unbiased
    because the tokens came from the rollout policy. `logprob_gap` is the mean |log pi - rollout log pi| in nats.
    """

    mean: float
    max: float
    clipped_share: float
    kl: float
    logprob_gap: float


def denominators(
    loss_tokens: Sequence[int], groups: Sequence[int], normalise: Literal["tokens", "group"]
) -> list[float]:
    """What the tokens of each sample are divided by, from the whole optimiser batch, whatever its micro-batches.

    `loss_tokens[i]` and `groups[i]` belong to sample i. Samples that will not be forwarded count like any other.
    """
    total = sum(loss_tokens)
    if total == 0:
        raise EmptyBatchError(f"none of the {len(loss_tokens)} samples of the batch has a loss token")
    if normalise == "tokens":
        return [float(total)] * len(loss_tokens)
    per_group: Counter[int] = Counter()
    for group, count in zip(groups, loss_tokens, strict=True):
        per_group[group] += count
    non_empty = sum(count > 0 for count in per_group.values())
    # A sample of an empty group has no loss token to divide: any positive number serves.
    return [float(non_empty * max(1, per_group[group])) for group in groups]


def cispo_loss(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: Tensor | float,
    config: CispoConfig,
) -> Tensor:
    """Scalar loss `-sum_t mask_t / denominator * sg(clip(r_t, 1 - e_low, 1 + e_high)) * A_t * log pi_t`.

    `logprobs` (nats, with gradient), `rollout_logprobs`, `advantages` and the boolean `mask` have one shape, padded
    [B, T] or flat [N]. `denominator` is a number or broadcasts to that shape, and is global: the losses of
    micro-batches then add up to the loss of the batch. Values where the mask is off are never read, whatever they
    are; a mask that is off everywhere gives 0, for one micro-batch may well be empty (`denominators` refuses a batch).
    """
    weight = _ratio(logprobs, rollout_logprobs, mask, config).clamp(1.0 - config.e_low, 1.0 + config.e_high)
    # where() rather than a product: 0 * inf at a padded position would be NaN, forwards and backwards.
    log_pi = torch.where(mask, logprobs, 0.0)
    scale = torch.where(mask, advantages, 0.0) / denominator
    return -(weight * scale * log_pi).sum()


def _ratio(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CispoConfig) -> Tensor:
    """pi / pi_rollout per token, detached; 1 where the mask is off."""
    log_ratio = torch.where(mask, logprobs.detach() - rollout_logprobs, 0.0)
    return log_ratio.clamp(-config.max_log_ratio, config.max_log_ratio).exp()


def ratio_stats(logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, config: CispoConfig) -> RatioStats:
    """Diagnostics of one batch, same shapes as `cispo_loss`. At least one loss token, else EmptyBatchError."""
    new, old, on = logprobs.detach()[mask], rollout_logprobs[mask], mask[mask]
    if not len(new):
        raise EmptyBatchError("ratio statistics of no loss token")
    ratio = _ratio(new, old, on, config)
    clipped = (ratio < 1.0 - config.e_low) | (ratio > 1.0 + config.e_high)
    # One transfer for all figures: on a GPU each .item() would wait for the stream.
    mean, top, share, kl, gap = torch.stack(
        [
            ratio.mean(),
            ratio.max(),
            clipped.to(ratio.dtype).mean(),
            (ratio - 1.0 - ratio.log()).mean(),
            (new - old).abs().mean(),
        ]
    ).tolist()
    return RatioStats(mean=mean, max=top, clipped_share=share, kl=kl, logprob_gap=gap)
