"""A train engine without torch that learns nothing: what is run and tested with it is everything around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from forge.train import checkpoint
from forge.train.checkpoint import Checkpointed, Position
from forge.train.protocol import StepMetrics
from forge.types import TrainSample


class FakeTrainer(Checkpointed):
    """A `forge.train.protocol.Trainer`. Its checkpoints are the model it began with, file for file: it holds them all,
    since a run outlives the checkpoint it was resumed from."""

    def __init__(self, model_dir: Path) -> None:
        self.steps = 0
        files = (path for path in sorted(model_dir.iterdir()) if path.is_file() and path.name != checkpoint.MANIFEST)
        self._files = {path.name: path.read_bytes() for path in files}

    @classmethod
    def resume(cls, folder: Path) -> tuple[FakeTrainer, Position]:
        """Go on from a checkpoint of any engine. Raises CheckpointError for a damaged one."""
        position = checkpoint.read(folder)
        engine = cls(folder)
        engine.steps = position.step
        return engine, position

    def step(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """Counts the batch. Loss and gradient are zero."""
        began = time.perf_counter()
        self.steps += 1
        tokens = sum(len(sample.token_ids) for sample in samples)
        return StepMetrics(
            step=self.steps,
            loss=0.0,
            grad_norm=0.0,
            update_variance=None,
            micro_batches=1,
            samples=len(samples),
            skipped_samples=0,
            tokens=tokens,
            loss_tokens=sum(sum(sample.loss) for sample in samples),
            flat_tokens=tokens,
            forward_tokens=0,
            padded_tokens=0,
            ratio=None,
            entropy=None,
            seconds=time.perf_counter() - began,
        )

    def close(self) -> None:
        pass

    def _save_files(self, folder: Path) -> None:
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
