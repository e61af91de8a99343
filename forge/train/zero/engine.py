"""The train engine over several processes, beside the single-process `forge.train.engine`: same steps, same files.

Loss and weights are those of one process to rounding (1e-5 in float32), at ZeRO stage 1 (optimiser state
partitioned), 2 (gradients too) or 3 (weights too), on any number of ranks of this machine. A checkpoint is the single
process's, and either goes on from the other's. Each rank first loads the whole model, which stage 3 then partitions.
A mixture of experts must hold its experts in one tensor, as transformers' do: ranks reduce gradients in one order.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from forge.train import checkpoint
from forge.train.checkpoint import Checkpointed, Position
from forge.train.cispo import RatioStats, ratio_stats
from forge.train.microbatch import forward_length
from forge.train.protocol import StepMetrics
from forge.train.step import (
    OPTIMIZER_FILE,
    Gradient,
    NonFiniteGradientError,
    TrainConfig,
    has_signal,
    prepared,
    step_metrics,
)
from forge.train.zero.messages import Save, Seen, Setup, Work
from forge.train.zero.portions import rounds, split
from forge.train.zero.ranks import Ranks
from forge.types import ForgeError, TrainSample


class ZeroEngine(Checkpointed):
    """A `forge.train.protocol.Trainer`. `close()` it, or end the process: the ranks end with it."""

    def __init__(
        self, model_dir: Path, config: TrainConfig, *, ranks: int, stage: int, log: Path | None = None
    ) -> None:
        """Takes seconds. `log` receives what DeepSpeed and torchrun print.

        Raises ForgeError without DeepSpeed, or for a `config.dtype` but float32.
        """
        self._begin(model_dir, config, ranks, stage, log, None)
        self.steps = 0

    @classmethod
    def resume(
        cls, folder: Path, config: TrainConfig, *, ranks: int, stage: int, log: Path | None = None
    ) -> tuple[ZeroEngine, Position]:
        """The engine as it was when checkpoint `folder` was saved, by `TrainEngine` or any number of ranks and stage.

        Raises CheckpointError if the folder is not whole, else as the constructor.
        """
        position = checkpoint.read(folder)
        engine = cls.__new__(cls)
        engine._begin(folder, config, ranks, stage, log, folder / OPTIMIZER_FILE)
        engine.steps = position.step
        return engine, position

    def _begin(
        self, model_dir: Path, config: TrainConfig, ranks: int, stage: int, log: Path | None, optimizer: Path | None
    ) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            raise ForgeError("train.engine = 'deepspeed': DeepSpeed is missing; pip install 'forge-rl[deepspeed]'")
        if config.dtype != "float32":
            raise ForgeError(
                f"train.dtype = {config.dtype!r}: DeepSpeed's ranks compute in float32; or use one process"
            )
        self.config = config
        self.companions = checkpoint.companions(model_dir)
        described = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        self.limit: int | None = getattr(described, "max_position_embeddings", None)
        self.ranks = Ranks(ranks, log)
        self.ranks.ask([Setup(model_dir=model_dir, config=config, stage=stage, optimizer=optimizer)] * ranks)

    def step(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """As `TrainEngine.step`, but for `update_variance`, which is None: ranks never see a micro-batch's gradient.

        Raises RankDiedError where a rank ended.
        """
        start = time.perf_counter()
        kept, denominators = prepared(samples, self.config.cispo, self.limit)
        portions = split(
            kept, denominators, self.ranks.count, self.config.token_budget, merge=self.config.merge == "tree"
        )
        together = rounds(portions)
        self.ranks.doing = f"in optimiser step {self.steps + 1}"
        seen: list[Seen] = self.ranks.ask([Work(portion=portion, rounds=together) for portion in portions])
        gradient = self._gradient(seen, samples)
        if not math.isfinite(gradient.norm):
            raise NonFiniteGradientError(f"gradient norm is {gradient.norm} at step {self.steps}; no update was made")
        self.steps += 1
        return step_metrics(self.steps, samples, gradient, time.perf_counter() - start)

    def close(self) -> None:
        self.ranks.close()

    def _save_files(self, folder: Path) -> None:
        self.ranks.doing = f"while saving step {self.steps}"
        self.ranks.ask([Save(folder=folder.absolute())] * self.ranks.count)
        checkpoint.write_companions(folder, self.companions)

    def _gradient(self, seen: Sequence[Seen], samples: Sequence[TrainSample]) -> Gradient:
        entropies = np.concatenate([one.entropies for one in seen])
        return Gradient(
            loss=sum(one.loss for one in seen),
            norm=seen[0].norm,
            variance=None,
            micro_batches=sum(one.micro_batches for one in seen),
            flat_tokens=sum(forward_length(sample) for sample in samples if has_signal(sample)),
            forward_tokens=sum(one.forward_tokens for one in seen),
            padded_tokens=sum(one.padded_tokens for one in seen),
            ratio=self._ratio(seen),
            entropy=float(entropies.mean()) if len(entropies) else None,
        )

    def _ratio(self, seen: Sequence[Seen]) -> RatioStats | None:
        new = torch.from_numpy(np.concatenate([one.logprobs for one in seen]))
        old = torch.from_numpy(np.concatenate([one.rollout_logprobs for one in seen]))
        if not len(new):
            return None
        return ratio_stats(new, old, torch.ones_like(new, dtype=torch.bool), self.config.cispo)
