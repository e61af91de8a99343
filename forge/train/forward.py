"""A micro-batch's share of the gradient: logprobs of its loss tokens under the trainer's weights, its loss, its
gradients.

`padded` and `merged` forward a micro-batch at once; `forge.train.streaming` does it piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forge.train.attention import TreeLayout
from forge.train.heads import logits_of_rows
from forge.train.microbatch import MicroBatch
from forge.train.tree import TreeModel
from forge.train.tree_hook import TreeCall

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


def padded(model: Any, micro: MicroBatch, loss_of: LossOf, parameters: Sequence[Tensor], *, autocast: bool) -> Share:
    """Samples side by side."""
    logits = logits_of_rows(model, micro.rows, autocast=autocast, input_ids=micro.input_ids)
    return _share(logits, micro, loss_of, parameters)


def merged(tree: TreeModel, micro: MicroBatch, loss_of: LossOf, parameters: Sequence[Tensor]) -> Share:
    """Samples as a forest."""
    assert micro.forest is not None
    call = TreeCall(TreeLayout.of(micro.forest), tree.attend)
    logits = tree.logits_of_chunk(micro.forest, 0, len(micro.forest), call, micro.rows)
    return _share(logits, micro, loss_of, parameters)


def _share(logits: Tensor, micro: MicroBatch, loss_of: LossOf, parameters: Sequence[Tensor]) -> Share:
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
