"""What a trainer process needs of a train engine, whatever it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from forge.train.step import StepMetrics
from forge.types import Json, TrainSample


class Trainer(Protocol):
    """A model and its optimiser. `forge.train.engine.TrainEngine` is one process; `forge.train.zero.engine.ZeroEngine`
    spreads the same steps over ranks. Each begins with a model folder, or with any checkpoint of either (`resume`).

    Both raise ForgeError for what the user has to mend, and then are of no more use.
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
