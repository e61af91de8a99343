"""A micro-batch's share of the gradient: logprobs of its loss tokens under the trainer's weights, its loss, its
gradients.

`logits` and `share` take a micro-batch at once; `forge.train.streaming` does it piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.train.cispo import CispoConfig, cispo_loss
from forge.train.heads import logits_of_rows
from forge.train.microbatch import MicroBatch
from forge.train.tree import TreeModel

#: logprobs [N] of the loss tokens to the scalar share of the batch loss
LossOf = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Share:
    """`grads` are by parameter, in the order given; `logprobs` and `entropies` [N] of the loss tokens, without
    gradient, in nats."""

    loss: Tensor
    grads: Sequence[Tensor]
    logprobs: Tensor
    entropies: Tensor


def loss_of(micro: MicroBatch, config: CispoConfig) -> LossOf:
    """CISPO on a micro-batch: of its flat loss tokens every one counts, padding was never gathered."""

    def loss(new: Tensor) -> Tensor:
        every = torch.ones_like(new, dtype=torch.bool)
        return cispo_loss(new, micro.rollout_logprobs, micro.advantages, every, micro.denominator, config)

    return loss


def logits(model: Any, tree: TreeModel | None, micro: MicroBatch, *, autocast: bool = False) -> Tensor:
    """[R, vocabulary]: by `tree` where the samples are merged (which knows its own precision), else by `model`."""
    if micro.forest is None:
        return logits_of_rows(model, micro.rows, autocast=autocast, input_ids=micro.input_ids)
    assert tree is not None
    return tree.logits(micro.forest, micro.rows)


def share(logits: Tensor, micro: MicroBatch, loss_of: LossOf, parameters: Sequence[Tensor]) -> Share:
    """Loss and gradients from a micro-batch's logits."""
    new, entropy = token_logprobs(logits, micro.row_temperature, micro.row_of, micro.targets)
    loss = loss_of(new)
    # autograd.grad and not backward(): each micro-batch's own norm is needed before they are summed.
    grads = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return Share(loss.detach(), grads, new.detach(), entropy)


def token_logprobs(logits: Tensor, temperature: Tensor, row_of: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logprob (with gradient) and entropy (without) of each of N tokens, both [N] in nats, from logits [R, vocabulary].

    Under the distribution the rollout sampled: logits divided by the temperature [R], the whole vocabulary kept.
    Softmax runs in the temperature's data type even where the model computes in bfloat16.
    """
    table = torch.log_softmax(logits.to(temperature.dtype) / temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(table.exp()).sum(dim=-1)
    return table[row_of, targets], entropy[row_of]
