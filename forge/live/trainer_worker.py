"""The child process of the train engine: a batch of trajectories in, a durable checkpoint out.

In:  ("step", step, positions, groups) with groups a list of lists of Trajectory
Out: ("ready", step), ("stepped", Stepped), ("failed", text)
The checkpoint is whole and on disk before "stepped" is sent; it is what commits the items (DESIGN section 2).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from forge.processing import Group, Survivors, longest_context
from forge.scenario import Scenario
from forge.train import checkpoint
from forge.train.engine import StepMetrics, TrainConfig, TrainEngine
from forge.train.samples import batch_samples
from forge.types import Trajectory


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

    section = scenario.train
    return TrainConfig(
        learning_rate=section.lr,
        weight_decay=section.weight_decay,
        max_grad_norm=section.grad_clip,
        token_budget=section.micro_batch_tokens,
        cispo=CispoConfig(e_low=section.e_low, e_high=section.e_high, normalise=section.normalise),
    )


class TrainerLoop:
    def __init__(self, pipe: Connection, scenario: Scenario, engine: TrainEngine, checkpoints: Path) -> None:
        self.pipe = pipe
        self.scenario = scenario
        self.engine = engine
        self.checkpoints = checkpoints

    def run(self) -> None:
        self.pipe.send(("ready", self.engine.steps))
        while True:
            _, step, positions, groups = self.pipe.recv()
            self.pipe.send(("stepped", self.step(step, positions, groups)))

    def step(self, step: int, positions: Sequence[int], groups: list[list[Trajectory]]) -> Stepped:
        began = time.perf_counter()
        section = self.scenario.train
        useful = section.process.process(groups)
        # A batch without any signal is survivors without signal: it takes its step with a zero gradient.
        useful = useful or Survivors().process(groups)
        parts = [useful] if section.batches is None else section.batches.split(useful, group_tokens)
        batches = [batch_samples(part) for part in parts]
        prepared = time.perf_counter()
        metrics = [self.engine.step(samples) for samples in batches]
        trained = time.perf_counter()
        folder = self.engine.save(
            self.checkpoints, step=step, version=step, positions=positions, keep=section.keep_checkpoints
        )
        saved = time.perf_counter()
        return Stepped(
            step=step,
            folder=folder,
            train_s=trained - prepared,
            data_s=prepared - began,
            io_s=saved - trained,
            tokens=sum(group_tokens(group) for group in groups),
            metrics=flat(metrics[-1]) | {"groups_kept": float(len(useful)), "optimiser_steps": float(len(metrics))},
        )


def group_tokens(group: Group) -> int:
    """Tokens of an item as the trainer would forward them: its members' longest contexts, whatever processing drops."""
    return sum(longest_context(member) for member in group)


def flat(metrics: StepMetrics) -> dict[str, float | None]:
    """The figures the trace keeps of an optimiser step."""
    ratio = metrics.ratio
    return {
        "loss": metrics.loss,
        "grad_norm": metrics.grad_norm,
        "update_variance": metrics.update_variance,
        "entropy": metrics.entropy,
        "loss_tokens": float(metrics.loss_tokens),
        "forward_tokens": float(metrics.forward_tokens),
        "skipped_samples": float(metrics.skipped_samples),
        "ratio_mean": ratio.mean if ratio else None,
        "ratio_max": ratio.max if ratio else None,
        "clipped_share": ratio.clipped_share if ratio else None,
    }


def main(pipe: Connection, scenario: Scenario, model_dir: Path, checkpoints: Path) -> None:
    """Entry point of the child: go on from the newest whole checkpoint, or begin with the model."""
    import torch

    torch.set_num_threads(1)
    try:
        config = train_config(scenario)
        newest = checkpoint.latest(checkpoints)
        engine = TrainEngine.resume(newest, config)[0] if newest else TrainEngine(model_dir, config)
        TrainerLoop(pipe, scenario, engine, checkpoints).run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # the parent ends the run with this line; the pool resumes from the last checkpoint
        pipe.send(("failed", f"trainer: {type(error).__name__}: {error}"))
