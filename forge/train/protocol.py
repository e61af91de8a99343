"""What a trainer process needs of a train engine, whatever it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forge.types import Json, TrainSample

if TYPE_CHECKING:  # it knows torch, which not every train engine needs
    from forge.train.cispo import RatioStats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimiser step. Counts ending in `tokens` and `samples` are of the whole batch unless said otherwise.

    `skipped_samples` had only zero advantages and were not forwarded. The others have `flat_tokens` in all, of which
    `forward_tokens` were forwarded, and `padded_tokens` with padding. `ratio`, `entropy` (mean nats) are over the
    forwarded loss tokens before the update; None if there were none. `grad_norm` is before clipping. `seconds` is wall
    time.

    `update_variance` is the trace of the unbiased covariance of the micro-batch gradients, each scaled to estimate
    the batch gradient: with h_i = M g_i, mean h = G = sum g_i, it is `M/(M-1) * (mean ||h_i||^2 - ||G||^2)`. None for
    M < 2. It falls as micro-batches grow; divided by `micro_batches` it estimates the variance of G itself. The
    micro-batches are sorted by length, hence not exchangeable: differences between long and short samples count too.
    """

    step: int
    loss: float
    grad_norm: float
    update_variance: float | None
    micro_batches: int
    samples: int
    skipped_samples: int
    tokens: int
    loss_tokens: int
    flat_tokens: int
    forward_tokens: int
    padded_tokens: int
    ratio: RatioStats | None
    entropy: float | None
    seconds: float


class Trainer(Protocol):
    """A model and its optimiser. `forge.train.engine.TrainEngine` is one process; `forge.train.zero.engine.ZeroEngine`
    spreads the same steps over ranks; `forge.train.fake_engine.FakeTrainer` learns nothing. Each begins with a model
    folder, or with any checkpoint of the first two (`resume`); the third also with its own.

    All raise ForgeError for what the user has to mend, and then are of no more use.
    """

    steps: int
    """Trainer steps taken: since the model, or as of the checkpoint begun with."""

    def step(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """One optimiser update on the whole batch, the loss divided by all its loss tokens however it is cut up.

        EmptyBatchError, NonFiniteGradientError and ValueError (a sample too long) leave everything as it was.
        """

    def save(
        self,
        root: Path,
        *,
        version: int,
        positions: Sequence[int],
        keep: int = 3,
        state: Json | None = None,
        step: int | None = None,
    ) -> Path:
        """Commit a checkpoint under `root` and return its folder, which is whole, on disk, and a model folder too.

        Version, positions and state are as in `checkpoint.Position`. `keep` checkpoints stay. `step` is the trainer
        step it ends, where one such takes several optimiser steps; None: `steps`.
        """

    def close(self) -> None:
        """Let go of processes and devices. What was not saved is lost."""
