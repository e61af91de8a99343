"""The gradient of a forest larger than memory allows at once: chunk by chunk, exact, whatever its depth.

1. Forward every chunk in preorder without a graph, keeping keys and values of every layer: logprobs of all tokens.
2. The user's loss on all of them gives each token's weight, dLoss/dlogprob: any loss, not only sums over tokens.
3. Backward, children first: each chunk is forwarded again with a graph, the keys and values above it as leaves. Its
   backward pass starts from its tokens' weights and from the gradients that chunks below left on its own keys and
   values, and leaves its share on those above, in accumulators of float32 (float64 for float64).

Activations are kept for one chunk only; keys and values of the whole forest are, which is a small part of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forge.forest import Forest
from forge.train.attention import TreeLayout, above
from forge.train.attention.layout import tensor
from forge.train.forward import LossOf, Share, token_logprobs
from forge.train.microbatch import MicroBatch
from forge.train.tree import TreeModel
from forge.train.tree_hook import TreeCall


def streamed(tree: TreeModel, micro: MicroBatch, loss_of: LossOf, parameters: Sequence[Tensor]) -> Share:
    """As `forge.train.forward.share`, in the chunks of `micro`."""
    assert micro.forest is not None
    memory = Memory(micro.forest, tree)
    pieces = [Piece(tree, micro, memory, first, last) for first, last in micro.chunks]
    logprobs = torch.zeros(len(micro.targets), dtype=micro.row_temperature.dtype, device=micro.targets.device)
    entropies = torch.zeros_like(logprobs)
    with torch.no_grad():
        for piece in pieces:
            call = piece.call()
            logprobs[piece.pairs], entropies[piece.pairs] = piece.forward(call)
            memory.keep(piece.first, piece.last, call.own)
    logprobs.requires_grad_()
    loss = loss_of(logprobs)
    (weights,) = torch.autograd.grad(loss, logprobs)
    total = [torch.zeros_like(value) for value in parameters]
    for piece in reversed(pieces):
        for into, grad in zip(total, piece.backward(weights, parameters), strict=True):
            into.add_(grad)
    return Share(loss.detach(), total, logprobs.detach(), entropies)


class Memory:
    """Keys and values of every token by layer, [1, H_kv, U, D], and the gradients they have gathered so far."""

    def __init__(self, forest: Forest, tree: TreeModel) -> None:
        self.size, self.device = len(forest), tree.device
        self.values: dict[int, tuple[Tensor, Tensor]] = {}
        self.grads: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(self, first: int, last: int, own: dict[int, tuple[Tensor, Tensor]]) -> None:
        for layer, pair in own.items():
            if layer not in self.values:
                shapes = [(*x.shape[:2], self.size, x.shape[3]) for x in pair]
                wide = torch.promote_types(pair[0].dtype, torch.float32)
                k, v = (x.new_zeros(s) for x, s in zip(pair, shapes, strict=True))
                self.values[layer] = k, v
                dk, dv = (x.new_zeros(s, dtype=wide) for x, s in zip(pair, shapes, strict=True))
                self.grads[layer] = dk, dv
            for into, x in zip(self.values[layer], pair, strict=True):
                into[:, :, first:last] = x

    def leaves(self, path: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Copies of what lies on a path, as leaves where gradients are wanted."""
        wanted = torch.is_grad_enabled()
        return {
            layer: (k[:, :, path].requires_grad_(wanted), v[:, :, path].requires_grad_(wanted))
            for layer, (k, v) in self.values.items()
        }


class Piece:
    """One chunk: its layout, the loss tokens it predicts, its two passes."""

    def __init__(self, tree: TreeModel, micro: MicroBatch, memory: Memory, first: int, last: int) -> None:
        assert micro.forest is not None
        self.tree, self.micro, self.memory, self.forest = tree, micro, memory, micro.forest
        self.first, self.last = first, last
        self.layout = TreeLayout.chunk(micro.forest, first, last)
        self.path = tensor(above(micro.forest, first), tree.device)
        inside = (micro.rows >= first) & (micro.rows < last)
        self.rows = torch.nonzero(inside)[:, 0]
        self.pairs = torch.nonzero(inside[micro.row_of])[:, 0]
        place = torch.cumsum(inside, 0) - 1
        self.row_of = place[micro.row_of[self.pairs]]

    def call(self) -> TreeCall:
        past = self.memory.leaves(self.path) if self.layout.past else None
        return TreeCall(self.layout, self.tree.attend, past)

    def forward(self, call: TreeCall) -> tuple[Tensor, Tensor]:
        micro = self.micro
        rows = micro.rows[self.rows] - self.first
        logits = self.tree.logits_of_chunk(self.forest, self.first, self.last, call, rows)
        return token_logprobs(logits, micro.row_temperature[self.rows], self.row_of, micro.targets[self.pairs])

    def backward(self, weights: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
        """The chunk's gradients by parameter; those of the keys and values above go to the memory."""
        call, outputs, seeds = self.seeded(weights)
        wanted = [*parameters, *self.leaves(call)]
        grads = torch.autograd.grad(outputs, wanted, seeds, materialize_grads=True)
        self.give(call, grads[len(parameters) :])
        return grads[: len(parameters)]

    def seeded(self, weights: Tensor) -> tuple[TreeCall, list[Tensor], list[Tensor]]:
        """The chunk forwarded with a graph: what a backward pass begins with, and the gradient given for each."""
        call = self.call()
        logprobs, _ = self.forward(call)
        here = slice(self.first, self.last)
        outputs, seeds = [logprobs], [weights[self.pairs]]
        for layer, own in call.own.items():
            for x, grad in zip(own, self.memory.grads[layer], strict=True):
                outputs.append(x)
                seeds.append(grad[:, :, here].to(x.dtype))
        return call, outputs, seeds

    def leaves(self, call: TreeCall) -> list[Tensor]:
        """The keys and values above, whose gradients `give` wants in this order."""
        return [x for pair in (call.past or {}).values() for x in pair]

    def give(self, call: TreeCall, grads: Sequence[Tensor]) -> None:
        of_leaves = iter(grads)
        for layer in call.past or {}:
            for into in self.memory.grads[layer]:
                into.index_add_(2, self.path, next(of_leaves).to(into.dtype))
