"""Micro-batches of whole samples: merged into a prefix forest, or padded side by side.

Padding stands on the right and needs no attention mask: a causal model's real tokens never look at it, and only loss
positions are read. Without a mask the fast causal kernel runs (the dense mask costs two to three times as much).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge.forest import Forest, Ints
from forge.train.planner import Part
from forge.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """`input_ids` [B, T]; N loss tokens, sample by sample; R rows of logits.

    `rows` [R] are rows of the flattened [B * T] hidden states, at `row_temperature` each; loss token n is predicted by
    row `row_of[n]`, the position before it: samples that share it share the row. Logprobs in nats; `denominator` is
    that of the token's sample. `tokens` are forwarded, without padding. `forest`, where samples were merged: then B is
    1 and T its distinct tokens, forwarded in `chunks` (first, one past the last).
    """

    input_ids: Tensor
    rows: Tensor
    row_temperature: Tensor
    row_of: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    denominator: Tensor
    tokens: int
    forest: Forest | None = None
    chunks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss tokens of some samples: all [N] but `counts`, how many each sample has. `at` is the position in it."""

    at: Ints
    targets: Ints
    logprobs: np.ndarray
    advantages: np.ndarray
    counts: Ints


def forward_length(sample: TrainSample) -> int:
    """Tokens the model must read: all before the last loss token, which is itself only predicted."""
    return max((t for t in range(len(sample.loss) - 1, 0, -1) if sample.loss[t]), default=0)


def inputs(sample: TrainSample) -> Ints:
    """The tokens the model must read."""
    return np.array(sample.token_ids[: forward_length(sample)], dtype=np.int64)


def plan(lengths: Sequence[int], budget: int, at_least: int) -> list[list[int]]:
    """Split samples into padded micro-batches of at most `budget` padded tokens, a longer sample alone in its own.

    Longest first, so padding stays small and memory peaks at once. The budget is lowered where that gives `at_least`
    micro-batches, which the gradient's variance needs; fewer come out only when single samples exceed it.
    """
    if at_least > 1:
        budget = min(budget, max(1, sum(lengths) // at_least))
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if room < 1:
            room = max(1, budget // lengths[i])
            batches.append([])
        batches[-1].append(i)
        room -= 1
    return batches


def padded(
    samples: Sequence[TrainSample], denominators: Sequence[float], device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    """Samples side by side; `denominators[b]` belongs to `samples[b]`."""
    ids = [inputs(sample) for sample in samples]
    width = max(len(one) for one in ids)
    grid = np.zeros((len(ids), width), dtype=np.int64)  # any valid id pads; 0 always is one
    for row, one in zip(grid, ids, strict=True):
        row[: len(one)] = one
    loss = _loss(samples)
    rows = np.repeat(np.arange(len(samples)) * width, loss.counts) + loss.at - 1
    row_of = np.arange(len(rows))
    return _micro_batch(grid, rows, row_of, samples, denominators, loss, sum(len(one) for one in ids), device, dtype)


def merged(
    samples: Sequence[TrainSample], denominators: Sequence[float], part: Part, device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    """The samples of one part of the plan as a forest of their own; lists of its samples only, in the plan's order."""
    forest = Forest.of([inputs(sample) for sample in samples])
    loss = _loss(samples)
    node = np.concatenate([forest.nodes_of(b)[at - 1] for b, at in enumerate(np.split(loss.at, _edges(loss)))])
    # A row is a token of the forest under one temperature; most batches know only one.
    kinds, kind = np.unique([sample.temperature for sample in samples], return_inverse=True)
    keys, row_of = np.unique(node * len(kinds) + np.repeat(kind, loss.counts), return_inverse=True)
    return _micro_batch(
        forest.tokens[None],
        keys // len(kinds),
        row_of,
        samples,
        denominators,
        loss,
        len(forest),
        device,
        dtype,
        forest=forest,
        chunks=tuple(part.bounds()),
        row_temperature=kinds[keys % len(kinds)],
    )


def _edges(loss: Loss) -> Ints:
    return np.cumsum(loss.counts)[:-1]


def _loss(samples: Sequence[TrainSample]) -> Loss:
    at = [np.flatnonzero(sample.loss[1:]) + 1 for sample in samples]

    def pick(name: str, dtype: type) -> np.ndarray:
        columns: list[np.ndarray] = [
            np.asarray(getattr(s, name), dtype=dtype)[t] for s, t in zip(samples, at, strict=True)
        ]
        return np.concatenate(columns)

    return Loss(
        at=np.concatenate(at),
        targets=pick("token_ids", np.int64),
        logprobs=pick("logprobs", np.float64),
        advantages=pick("advantages", np.float64),
        counts=np.array([len(t) for t in at], dtype=np.int64),
    )


def _micro_batch(
    input_ids: np.ndarray,
    rows: Ints,
    row_of: Ints,
    samples: Sequence[TrainSample],
    denominators: Sequence[float],
    loss: Loss,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    forest: Forest | None = None,
    chunks: tuple[tuple[int, int], ...] = (),
    row_temperature: np.ndarray | None = None,
) -> MicroBatch:
    def real(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def integer(values: np.ndarray) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    if row_temperature is None:
        row_temperature = np.repeat([sample.temperature for sample in samples], loss.counts)
    return MicroBatch(
        input_ids=integer(input_ids),
        rows=integer(rows),
        row_temperature=real(row_temperature),
        row_of=integer(row_of),
        targets=integer(loss.targets),
        rollout_logprobs=real(loss.logprobs),
        advantages=real(loss.advantages),
        denominator=real(np.repeat(denominators, loss.counts)),
        tokens=tokens,
        forest=forest,
        chunks=chunks,
    )
