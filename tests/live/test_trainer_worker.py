"""One trainer step as the child process makes it, without the process."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forge.live.trainer_worker import TrainerLoop, train_config
from forge.models import resolve
from forge.scenario import Scenario, parse
from forge.train import checkpoint
from forge.train.engine import TrainEngine
from forge.types import Completion, DeathReason, Outcome, Trajectory


def scenario(**train: object) -> Scenario:
    data = {"name": "t", "stop": {"items": 1}, "domains": [{"name": "calc"}], "train": train}
    return parse(data, "test")


def member(position: int, number: int, reward: float | None) -> Trajectory:
    name = f"{position}.{number}.0"
    completion = Completion(
        trajectory=name,
        index=0,
        prompt_ids=(3, 4, 5),
        sampled_ids=(6 + number, 7),
        logprobs=(-1.0, -2.0),
        versions=(0, 0),
        finish="stop",
        temperature=1.0,
        received_s=0.0,
        first_token_s=0.1,
        finished_s=0.2,
        instance=0,
    )
    reason = None if reward is not None else DeathReason.TIMEOUT
    outcome = Outcome(trajectory=name, reward=reward, reason=reason)
    return Trajectory(id=name, position=position, member=number, completions=(completion,), outcome=outcome)


def group(position: int, *rewards: float | None) -> list[Trajectory]:
    return [member(position, number, reward) for number, reward in enumerate(rewards)]


def loop(tmp_path: Path, **train: object) -> TrainerLoop:
    wanted = scenario(**train)
    ours, _theirs = Pipe()
    engine = TrainEngine(resolve("quickstart"), train_config(wanted))
    return TrainerLoop(ours, wanted, engine, tmp_path / "checkpoints")


def test_the_checkpoint_holds_the_items_and_the_step(tmp_path: Path) -> None:
    stepped = loop(tmp_path).step(7, [4, 5], [group(4, 1.0, 0.0), group(5, 1.0, 1.0, None)], 6)
    position = checkpoint.read(stepped.folder)
    assert (position.step, position.version, position.positions) == (7, 7, (4, 5))
    assert stepped.metrics["groups_kept"] == 1  # the second group has no variance
    # Two members and two survivors of five tokens each: consumed, whatever processing drops.
    assert stepped.tokens == 20


def test_batches_cut_a_step_into_optimiser_steps_but_one_checkpoint(tmp_path: Path) -> None:
    trainer = loop(tmp_path, batches={"kind": "by_items", "items": 1})
    stepped = trainer.step(1, [0, 1], [group(0, 1.0, 0.0), group(1, 0.0, 1.0)], 0)
    assert stepped.metrics["optimiser_steps"] == 2
    assert checkpoint.read(stepped.folder).step == 1


def test_a_batch_without_signal_still_makes_its_step(tmp_path: Path) -> None:
    trainer = loop(tmp_path)
    before = {name: value.clone() for name, value in trainer.engine.parameters.items()}
    stepped = trainer.step(1, [0], [group(0, 1.0, 1.0)], 0)
    assert checkpoint.read(stepped.folder).positions == (0,)
    assert stepped.metrics["grad_norm"] == 0.0
    assert all((before[name] == value).all() for name, value in trainer.engine.parameters.items())


def test_learning_rate_zero_changes_nothing(tmp_path: Path) -> None:
    trainer = loop(tmp_path, lr=0.0)
    before = {name: value.clone() for name, value in trainer.engine.parameters.items()}
    trainer.step(1, [0], [group(0, 1.0, 0.0)], 0)
    assert all((before[name] == value).all() for name, value in trainer.engine.parameters.items())


def test_filters_that_leave_nothing_teach_nothing(tmp_path: Path) -> None:
    trainer = loop(tmp_path, process={"kind": "max_tokens", "limit": 2})
    stepped = trainer.step(1, [0], [group(0, 1.0, 0.0)], 0)
    assert stepped.metrics["grad_norm"] == 0.0
    assert checkpoint.read(stepped.folder).positions == (0,)


def test_checkpoints_an_engine_may_still_load_stay(tmp_path: Path) -> None:
    trainer = loop(tmp_path, lr=0.0)
    kept = []
    for step, oldest in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 4)):
        folder = trainer.step(step, [step], [group(step, 1.0, 0.0)], oldest).folder
        kept.append(sorted(p.name for p in folder.parent.iterdir()))
    assert kept[3] == [f"step-{n:06d}" for n in (1, 2, 3, 4)]
    assert kept[4] == [f"step-{n:06d}" for n in (4, 5)]
