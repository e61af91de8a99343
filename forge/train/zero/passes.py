"""The passes of one rank over its micro-batches, in step with all other ranks.

ZeRO gathers weights and reduces gradients in collective operations within a model's forward and backward passes, so
every rank must make the same passes in the same order, however unequal the portions. A rank with nothing to do forwards
one token at a weight of zero.

A backward pass begins at one scalar, as DeepSpeed wants it. A streamed forest (`forge.train.streaming`) has to begin
at many tensors with a gradient given for each: their scalar is the sum of each tensor times its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import Tensor

from forge.forest import Forest
from forge.train import forward
from forge.train.forward import LossOf, token_logprobs
from forge.train.heads import logits_of_rows
from forge.train.microbatch import MicroBatch
from forge.train.streaming import Memory, Piece
from forge.train.tree import TreeModel
from forge.train.tree_hook import TreeCall


class Unit(Protocol):
    """A micro-batch as passes, each of which forwards the model once: first `chunks` without a graph if that is more
    than one, then `chunks` with a graph, a scalar and a backward pass. `loss`, `logprobs` and `entropies` afterwards,
    without gradient."""

    micro: MicroBatch
    chunks: int
    loss: Tensor
    logprobs: Tensor
    entropies: Tensor

    def look(self, i: int, /) -> None: ...

    def scalar(self, i: int, /) -> Tensor: ...

    def settle(self, i: int, /) -> None:
        """After the backward pass of `scalar(i)`."""


class Backward(Protocol):
    """How DeepSpeed is driven: `prepare` before the forward pass of each backward pass, which then comes. `last`: the
    gradients of the step are complete after it."""

    def prepare(self, *, last: bool) -> None: ...

    def backward(self, scalar: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Passes:
    """What all units of a rank have in common. `model` is called; `tree` reads forests with it, None if padded.

    `weight` multiplies what the backward passes begin with: DeepSpeed takes the mean over ranks of what is a sum.
    """

    model: Any
    tree: TreeModel | None
    weight: float

    def unit(self, micro: MicroBatch, loss_of: LossOf) -> Unit:
        if len(micro.chunks) > 1:
            return _Streamed(self, micro, loss_of)
        return _Whole(self, micro, loss_of)

    def idle(self) -> Tensor:
        """A pass of one token that teaches nothing: zero, with a graph over every parameter."""
        device = next(self.model.parameters()).device
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        if self.tree is None:
            return 0.0 * logits_of_rows(self.model, rows, input_ids=rows[None]).sum()
        return 0.0 * self.tree.logits(Forest.of([[0]]), rows).sum()

    def run(self, units: Sequence[Unit], rounds: Sequence[int], engine: Backward) -> None:
        """Go through all rounds; unit r takes its part in round r, which has at least as many chunks as it."""
        for number, (size, unit) in enumerate(zip_longest(rounds, units)):
            if size > 1:
                with torch.no_grad():
                    for i in range(size):
                        if unit is not None and unit.chunks > 1 and i < unit.chunks:
                            unit.look(i)
                        else:
                            self.idle()
            for i in range(size):
                engine.prepare(last=number == len(rounds) - 1 and i == size - 1)
                if unit is not None and i < unit.chunks:
                    engine.backward(unit.scalar(i))
                    unit.settle(i)
                else:
                    engine.backward(self.idle())


class _Whole:
    """A micro-batch forwarded at once."""

    def __init__(self, passes: Passes, micro: MicroBatch, loss_of: LossOf) -> None:
        self.passes, self.micro, self.loss_of = passes, micro, loss_of
        self.chunks = 1

    def look(self, _: int, /) -> None:
        raise AssertionError("a micro-batch in one chunk needs no look ahead")

    def scalar(self, _: int, /) -> Tensor:
        micro = self.micro
        logits = forward.logits(self.passes.model, self.passes.tree, micro)
        new, self.entropies = token_logprobs(logits, micro.row_temperature, micro.row_of, micro.targets)
        loss = self.loss_of(new)
        self.loss, self.logprobs = loss.detach(), new.detach()
        return loss * self.passes.weight

    def settle(self, _: int, /) -> None:
        pass


class _Streamed:
    """A forest forwarded chunk by chunk, then backwards from its last chunk to its first."""

    def __init__(self, passes: Passes, micro: MicroBatch, loss_of: LossOf) -> None:
        assert micro.forest is not None
        assert passes.tree is not None
        self.passes, self.micro, self.loss_of = passes, micro, loss_of
        memory = Memory(micro.forest, passes.tree)
        self.pieces = [Piece(passes.tree, micro, memory, first, last) for first, last in micro.chunks]
        self.chunks = len(self.pieces)
        self.logprobs = torch.zeros(len(micro.targets), dtype=micro.row_temperature.dtype, device=micro.targets.device)
        self.entropies = torch.zeros_like(self.logprobs)
        self.weights: Tensor | None = None
        self.call: TreeCall | None = None

    def look(self, i: int, /) -> None:
        piece = self.pieces[i]
        call = piece.call()
        self.logprobs[piece.pairs], self.entropies[piece.pairs] = piece.forward(call)
        piece.memory.keep(piece.first, piece.last, call.own)

    def scalar(self, _: int, /) -> Tensor:
        if self.weights is None:
            leaf = self.logprobs.clone().requires_grad_()
            loss = self.loss_of(leaf)
            self.weights = torch.autograd.grad(loss, leaf)[0] * self.passes.weight
            self.loss = loss.detach()
        self.call, outputs, seeds = self.pieces[-1].seeded(self.weights)
        return torch.stack([(x * seed).sum() for x, seed in zip(outputs, seeds, strict=True)]).sum()

    def settle(self, _: int, /) -> None:
        assert self.call is not None
        piece, call = self.pieces.pop(), self.call  # with the last piece goes the memory they share
        piece.give(call, [torch.zeros_like(x) if x.grad is None else x.grad for x in piece.leaves(call)])
        self.call = None  # and the graph
