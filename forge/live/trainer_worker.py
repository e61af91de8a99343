"""The child process of the train engine: a batch of trajectories in, a durable checkpoint out.

In:  ("step", step, positions, groups, oldest) with groups a list of lists of Trajectory; `oldest` is the lowest version
     that an engine may still load, whose checkpoint must stay
Out: ("ready", step), ("stepped", Stepped)
The checkpoint is whole and on disk before "stepped" is sent; it is what commits the items (DESIGN section 2).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from forge.processing import Group, Survivors, longest_context, sampled
from forge.scenario import Scenario
from forge.train.samples import batch_samples
from forge.types import TrainSample, Trajectory

if TYPE_CHECKING:  # the process that starts this one does without torch: loading it takes seconds
    from forge.train.protocol import StepMetrics, Trainer
    from forge.train.step import TrainConfig

#: in the run folder: what DeepSpeed and torchrun print
LOG = "deepspeed.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One trainer step, durable in `folder`. Seconds: optimiser, trajectories to samples, checkpoint."""

    step: int
    folder: Path
    train_s: float
    data_s: float
    io_s: float
    tokens: int
    metrics: dict[str, float | None]


def train_config(scenario: Scenario) -> TrainConfig:
    from forge.train.cispo import CispoConfig
    from forge.train.step import TrainConfig

    section = scenario.train
    return TrainConfig(
        learning_rate=section.lr,
        weight_decay=section.weight_decay,
        max_grad_norm=section.grad_clip,
        token_budget=section.micro_batch_tokens,
        merge=section.merge,
        attention=section.attention,
        device=section.device,
        cispo=CispoConfig(e_low=section.e_low, e_high=section.e_high, normalise=section.normalise),
    )


class TrainerLoop:
    def __init__(self, pipe: Connection, scenario: Scenario, engine: Trainer, checkpoints: Path) -> None:
        self.pipe = pipe
        self.scenario = scenario
        self.engine = engine
        self.checkpoints = checkpoints

    def run(self) -> None:
        self.pipe.send(("ready", self.engine.steps))
        while True:
            _, step, positions, groups, oldest = self.pipe.recv()
            self.pipe.send(("stepped", self.step(step, positions, groups, oldest)))

    def step(self, step: int, positions: Sequence[int], groups: list[list[Trajectory]], oldest: int) -> Stepped:
        began = time.perf_counter()
        section = self.scenario.train
        useful = section.process.process(groups)
        if useful:
            parts = [useful] if section.batches is None else section.batches.split(useful, group_tokens)
            batches = [batch_samples(part) for part in parts]
        else:  # the items are consumed all the same: a step with a zero gradient, and its checkpoint
            batches = [[without_signal(sample) for sample in batch_samples(Survivors().process(groups))]]
        prepared = time.perf_counter()
        metrics = [self.engine.step(samples) for samples in batches]
        trained = time.perf_counter()
        keep = max(section.keep_checkpoints, step - oldest + 1)
        folder = self.engine.save(self.checkpoints, step=step, version=step, positions=positions, keep=keep)
        saved = time.perf_counter()
        return Stepped(
            step=step,
            folder=folder,
            train_s=trained - prepared,
            data_s=prepared - began,
            io_s=saved - trained,
            tokens=sum(group_tokens(group) for group in groups),
            metrics=flat(metrics) | {"groups_kept": float(len(useful)), "optimiser_steps": float(len(metrics))},
        )


def group_tokens(group: Group) -> int:
    """Tokens of an item as a trainer without filters forwards them: its survivors' longest contexts."""
    return sum(longest_context(member) for member in group if sampled(member))


def without_signal(sample: TrainSample) -> TrainSample:
    return replace(sample, advantages=(0.0,) * len(sample.advantages))


def flat(steps: Sequence[StepMetrics]) -> dict[str, float | None]:
    """The figures the trace keeps of a trainer step: means over its optimiser steps, sums of counts, largest ratio."""
    ratios = [m.ratio for m in steps if m.ratio is not None]
    return {
        "loss": mean([m.loss for m in steps]),
        "grad_norm": mean([m.grad_norm for m in steps]),
        "update_variance": mean([m.update_variance for m in steps]),
        "entropy": mean([m.entropy for m in steps]),
        "loss_tokens": float(sum(m.loss_tokens for m in steps)),
        "flat_tokens": float(sum(m.flat_tokens for m in steps)),
        "forward_tokens": float(sum(m.forward_tokens for m in steps)),
        "skipped_samples": float(sum(m.skipped_samples for m in steps)),
        "ratio_mean": mean([r.mean for r in ratios]),
        "ratio_max": max((r.max for r in ratios), default=None),
        "clipped_share": mean([r.clipped_share for r in ratios]),
        "logprob_gap": mean([r.logprob_gap for r in ratios]),
    }


def mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def main(pipe: Connection, scenario: Scenario, model_dir: Path, newest: Path | None, checkpoints: Path) -> None:
    """Entry point of the child: go on from checkpoint `newest`, or begin with the model."""
    with contextlib.closing(train_engine(scenario, model_dir, newest, checkpoints.parent / LOG)) as engine:
        TrainerLoop(pipe, scenario, engine, checkpoints).run()


def train_engine(scenario: Scenario, model_dir: Path, newest: Path | None, log: Path) -> Trainer:
    """The train engine that the scenario names. Raises ForgeError where it cannot be had."""
    section = scenario.train
    if section.engine == "fake":
        from forge.train.fake_engine import FakeTrainer

        return FakeTrainer.resume(newest)[0] if newest else FakeTrainer(model_dir)
    import torch

    torch.set_num_threads(1)
    config = train_config(scenario)
    if section.engine == "torch":
        from forge.train.engine import TrainEngine

        return TrainEngine.resume(newest, config)[0] if newest else TrainEngine(model_dir, config)
    from forge.train.zero.engine import ZeroEngine

    ranks, stage = section.ranks, section.zero
    if newest:
        return ZeroEngine.resume(newest, config, ranks=ranks, stage=stage, log=log)[0]
    return ZeroEngine(model_dir, config, ranks=ranks, stage=stage, log=log)
