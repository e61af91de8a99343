"""DeepSpeed's ZeRO over two processes against one process: the same steps, the same files, and clear deaths."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from zero_support import alive, distance, gone, longer, moved, threads

from forge.train import checkpoint
from forge.train.cispo import EmptyBatchError
from forge.train.engine import TrainEngine
from forge.train.step import NonFiniteGradientError, TrainConfig, prepared
from forge.train.zero.engine import ZeroEngine
from forge.train.zero.messages import Seen, Work
from forge.train.zero.portions import rounds, split
from forge.train.zero.ranks import RankDiedError
from forge.types import TrainSample

MakeSamples = Callable[..., list[TrainSample]]

pytestmark = [
    pytest.mark.timeout(170),
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="DeepSpeed is missing: pip install 'forge-rl[deepspeed]'"
    ),
]

#: Small budgets: several micro-batches a rank, and streamed forests. Small steps: Adam turns rounding into steps of its
#: own where a gradient is next to nothing.
CONFIG = TrainConfig(learning_rate=1e-3, token_budget=60, weight_decay=0.01)
EXACT = 1e-5


def batches(make_samples: MakeSamples) -> list[list[TrainSample]]:
    """Ten steps: mixed, streamed, one sample for two ranks, and nothing to learn."""
    made = [make_samples(seed, 12, shared=0.7) for seed in range(7)]
    made.insert(2, longer(make_samples(20, 8, shared=0.9, zero=0.0), 3))
    made.insert(4, make_samples(21, 1, zero=0.0))
    made.insert(6, make_samples(22, 4, zero=1.1))
    return made


@pytest.fixture(scope="module")
def one_process(
    tiny_model: Path, make_samples: MakeSamples, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Path]:
    """Metrics of each step of a single process, and its checkpoint after ten."""
    engine = TrainEngine(tiny_model, CONFIG)
    metrics = [engine.step(batch) for batch in batches(make_samples)]
    return metrics, engine.save(tmp_path_factory.mktemp("one"), version=1, positions=(1,))


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_take_the_steps_of_one_process(
    tiny_model: Path, make_samples: MakeSamples, tmp_path: Path, one_process: tuple[list[Any], Path], stage: int
) -> None:
    expected, folder = one_process
    with closing(ZeroEngine(tiny_model, CONFIG, ranks=2, stage=stage)) as engine:
        refuses_a_bad_batch(engine, make_samples)
        for batch, one in zip(batches(make_samples), expected, strict=True):
            got = engine.step(batch)
            assert (got.step, got.samples, got.flat_tokens) == (one.step, one.samples, one.flat_tokens)
            assert got.loss == pytest.approx(one.loss, rel=EXACT, abs=EXACT * 0.1)
            assert got.grad_norm == pytest.approx(one.grad_norm, rel=EXACT, abs=1e-9)
            assert (got.ratio is None) == (one.ratio is None) == (got.entropy is None)
            if got.ratio is not None:
                assert got.entropy == pytest.approx(one.entropy, rel=EXACT)
                assert got.ratio.mean == pytest.approx(one.ratio.mean, rel=EXACT)
            assert got.update_variance is None
        saved = engine.save(tmp_path, version=1, positions=(1,))
        pids = [*engine.ranks.pids, engine.ranks.torchrun]
        assert len(alive(pids)) == 3
    assert gone(pids, 0.1), "close() returns when nothing is left"
    assert moved(tiny_model, folder) > 100 * EXACT, "ten steps moved the weights"
    errors = {name: distance(saved, folder, name) for name in ("model.safetensors", "optimizer.safetensors")}
    print(
        f"\nZeRO-{stage}: weights after ten steps within {errors['model.safetensors']:.1e} (largest tensor), "
        f"all of them {moved(saved, folder):.1e}, Adam's moments {errors['optimizer.safetensors']:.1e}"
    )
    assert max(errors.values()) <= EXACT
    assert {p.name for p in saved.iterdir()} == {p.name for p in folder.iterdir()}


def refuses_a_bad_batch(engine: ZeroEngine, make_samples: MakeSamples) -> None:
    """What follows then equals the steps of a process that never saw these batches: nothing was changed."""
    (sample,) = make_samples(8, 1, zero=0.0)
    n = len(sample.token_ids)
    for advantage in (math.inf, math.nan):
        with pytest.raises(NonFiniteGradientError):
            engine.step([dataclasses.replace(sample, advantages=(advantage,) * n), *make_samples(9, 6)])
    with pytest.raises(EmptyBatchError):
        engine.step([dataclasses.replace(sample, loss=(False,) * n)])
    with pytest.raises(ValueError, match="max_position_embeddings"):
        engine.step(longer([dataclasses.replace(sample, token_ids=sample.token_ids)], 40))
    assert engine.steps == 0


@pytest.mark.slow
def test_a_missing_factor_would_be_noticed(tiny_model: Path, make_samples: MakeSamples) -> None:
    """Must-fail control: without the number of ranks as a factor, DeepSpeed's mean over ranks halves the gradient.

    Adam cannot see that (its step has no scale), which is why the test above compares norms too."""
    batch = make_samples(1, 8, zero=0.0)
    norm = TrainEngine(tiny_model, CONFIG).step(batch).grad_norm
    with closing(ZeroEngine(tiny_model, CONFIG, ranks=2, stage=2)) as engine:
        kept, denominators = prepared(batch, CONFIG.cispo, None)
        portions = split(kept, [2 * d for d in denominators], 2, CONFIG.token_budget, merge=True)
        seen: list[Seen] = engine.ranks.ask([Work(portion=portion, rounds=rounds(portions)) for portion in portions])
    assert seen[0].norm == pytest.approx(norm / 2, rel=EXACT)
    assert seen[0].norm != pytest.approx(norm, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_checkpoints_go_on_at_any_stage_and_number_of_ranks(
    tiny_model: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    """Nine steps in six lives, against nine of one engine. Three ranks divide no tensor's size evenly."""
    steps = [make_samples(seed, 10, shared=0.7) for seed in range(9)]
    whole = TrainEngine(tiny_model, CONFIG)
    for batch in steps:
        whole.step(batch)
    expected = whole.save(tmp_path / "whole", version=0, positions=())

    engine: Any = TrainEngine(tiny_model, CONFIG)
    root = tmp_path / "lives"
    for life, (kind, ranks) in enumerate([("one", 1), (3, 3), (1, 3), ("one", 1), (2, 1), (3, 2)]):
        if life:
            folder = checkpoint.latest(root)
            assert folder is not None
            engine, position = reopen(folder, kind, ranks)
            assert (engine.steps, position.step, position.positions) == (life, life, (life - 1,))
        for batch in steps[life : life + 1] if life < 5 else steps[life:]:
            engine.step(batch)
        engine.save(root, version=life, positions=(life,), keep=2)
        engine.close()
    last = checkpoint.latest(root)
    assert last is not None
    assert last.name == expected.name
    errors = [distance(last, expected, name) for name in ("model.safetensors", "optimizer.safetensors")]
    print(f"\nnine steps in six lives: weights within {errors[0]:.1e}, Adam's moments {errors[1]:.1e}")
    assert max(errors) <= EXACT
    # Control: the same last life with a fresh optimiser ends elsewhere.
    fresh = TrainEngine(root / "step-000005", CONFIG)
    for batch in steps[5:]:
        fresh.step(batch)
    assert distance(fresh.save(tmp_path / "fresh", version=0, positions=(), step=9), expected) > 10 * EXACT


def reopen(folder: Path, kind: Any, ranks: int) -> tuple[Any, Any]:
    if kind == "one":
        return TrainEngine.resume(folder, CONFIG)
    return ZeroEngine.resume(folder, CONFIG, ranks=ranks, stage=kind)


@pytest.fixture(scope="module")
def started(tiny_model: Path) -> Iterator[Callable[[], ZeroEngine]]:
    made: list[ZeroEngine] = []

    def start() -> ZeroEngine:
        made.append(ZeroEngine(tiny_model, CONFIG, ranks=2, stage=2))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["between steps", "in a collective operation"])
def test_a_killed_rank_is_a_clear_stop(started: Any, make_samples: MakeSamples, when: str) -> None:
    engine = started()
    engine.step(make_samples(0, 8))
    pids, victim = [*engine.ranks.pids, engine.ranks.torchrun], engine.ranks.pids[1]
    if when == "between steps":
        os.kill(victim, signal.SIGKILL)
    else:  # rank 0 waits for rank 1, which never comes
        os.kill(victim, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (victim, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RankDiedError, match=r"rank 1 was killed \(SIGKILL\) in optimiser step 2; .*--resume"):
        engine.step(make_samples(1, 8))
    print(f"\nkilled {when}: the error came after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < 15
    assert gone(pids, 0.1)
    assert not engine.ranks.folder.exists()


PROGRAM = """
import sys, time
from pathlib import Path
from forge.train.step import TrainConfig
from forge.train.zero.engine import ZeroEngine
engine = ZeroEngine(Path(sys.argv[1]), TrainConfig(), ranks=2, stage=1)
print(*engine.ranks.pids, engine.ranks.torchrun, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_nothing_outlives_a_killed_trainer(tiny_model: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_model)], stdout=subprocess.PIPE, text=True, env=threads()
    )
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(alive(pids)) == 3
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert gone(pids)
