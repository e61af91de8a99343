"""The train engine without torch: it counts, commits and goes on like the others, and changes no weight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forge.models import resolve
from forge.train import checkpoint
from forge.train.checkpoint import CheckpointError
from forge.train.fake_engine import FakeTrainer
from forge.types import TrainSample


def sample() -> TrainSample:
    return TrainSample(
        position=0,
        member=0,
        token_ids=(1, 2, 3),
        loss=(False, True, True),
        logprobs=(0.0, -0.1, -0.2),
        advantages=(0.0, 1.0, 1.0),
    )


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_step_counts_and_a_checkpoint_is_the_model_as_it_was(tmp_path: Path) -> None:
    model = resolve("quickstart")
    engine = FakeTrainer(model)
    assert engine.step([sample(), sample()]).loss_tokens == 4
    folder = engine.save(tmp_path, version=1, positions=(3, 5))
    assert checkpoint.read(folder).positions == (3, 5)
    assert weights(folder) == weights(model)
    assert {path.name for path in folder.iterdir()} == {path.name for path in model.iterdir()} | {checkpoint.MANIFEST}


def test_it_goes_on_from_its_checkpoint_also_when_older_ones_are_gone(tmp_path: Path) -> None:
    engine = FakeTrainer(resolve("quickstart"))
    for version in (1, 2, 3):
        engine.step([sample()])
        engine.save(tmp_path, version=version, positions=(version,), keep=1)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    resumed, position = FakeTrainer.resume(newest)
    assert (resumed.steps, position.version) == (3, 3)
    assert resumed.step([sample()]).step == 4
    assert weights(resumed.save(tmp_path, version=4, positions=(4,), keep=1)) == weights(resolve("quickstart"))
    newest = checkpoint.latest(tmp_path)
    assert newest is not None
    (newest / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        FakeTrainer.resume(newest)


def test_it_needs_no_torch() -> None:
    code = "import forge.train.fake_engine, forge.train.samples, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
