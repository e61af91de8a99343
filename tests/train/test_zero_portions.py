"""A batch split over ranks, and a rank's passes over its share: without processes and without DeepSpeed."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zero_support import longer

from forge.forest import Forest
from forge.train import microbatch
from forge.train.cispo import CispoConfig, cispo_loss
from forge.train.engine import TrainEngine
from forge.train.microbatch import MicroBatch
from forge.train.step import TrainConfig, prepared
from forge.train.zero.engine import ZeroEngine
from forge.train.zero.passes import Passes
from forge.train.zero.portions import Portion, balanced, rounds, split
from forge.train.zero.ranks import clear_abandoned
from forge.types import ForgeError, TrainSample

MakeSamples = Callable[..., list[TrainSample]]


def distinct(samples: list[TrainSample], run: list[int]) -> int:
    return len(Forest.of([microbatch.inputs(samples[i]) for i in run]))


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize(("count", "ranks"), [(0, 2), (1, 3), (12, 1), (12, 2), (13, 4)])
def test_every_sample_is_in_one_micro_batch_of_one_rank(
    make_samples: MakeSamples, merge: bool, count: int, ranks: int
) -> None:
    samples = make_samples(1, count, shared=0.7)
    denominators = [float(i + 1) for i in range(count)]
    portions = split(samples, denominators, ranks, 50, merge=merge)
    assert len(portions) == ranks
    found = [
        (portion.samples[i], portion.denominators[i])
        for portion in portions
        for p in portion.parts
        for i in p.sequences
    ]
    assert len(found) == count
    assert sorted(found, key=lambda pair: pair[1]) == list(zip(samples, denominators, strict=True))
    most = max(len(portion.parts) for portion in portions)
    assert len(rounds(portions)) == max(1, most)
    for portion in portions:
        for part, size in zip(portion.parts, rounds(portions), strict=False):
            assert part.chunks <= size


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_share_is_the_least_there_is(make_samples: MakeSamples, seed: int) -> None:
    samples, ranks = make_samples(seed, 7, shared=0.8), 3
    forest = Forest.of([microbatch.inputs(sample) for sample in samples])
    got = max(distinct(samples, run) for run in balanced(forest, ranks) if run)
    order = [int(i) for i in forest.order]
    cuts = itertools.combinations_with_replacement(range(len(order) + 1), ranks - 1)
    best = min(
        max(distinct(samples, order[a:b]) for a, b in itertools.pairwise([0, *cut, len(order)]) if a < b)
        for cut in cuts
    )
    assert got == best


class Local:
    """What DeepSpeed does on one rank of one: add up gradients. Counts passes and when the last was announced."""

    def __init__(self) -> None:
        self.announced: list[bool] = []

    def prepare(self, *, last: bool) -> None:
        self.announced.append(last)

    def backward(self, scalar: Tensor) -> None:
        scalar.backward()


def micro_batches(portion: Portion, engine: TrainEngine) -> list[MicroBatch]:
    device, out = engine.device, []
    for part in portion.parts:
        samples = [portion.samples[i] for i in part.sequences]
        denominators = [portion.denominators[i] for i in part.sequences]
        if engine.tree is None:
            out.append(microbatch.padded(samples, denominators, device, torch.float32))
        else:
            out.append(microbatch.merged(samples, denominators, part, device, torch.float32))
    return out


@pytest.mark.parametrize(("merge", "budget"), [("tree", 9999), ("tree", 25), ("none", 60)])
def test_the_passes_of_all_ranks_add_up_to_the_gradient(
    tiny_model: Path, make_samples: MakeSamples, merge: Any, budget: int
) -> None:
    """Two portions one after the other on one model, idle passes and rounds longer than a portion among them."""
    samples = longer(make_samples(3, 9, shared=0.8), 3)
    config = TrainConfig(merge=merge, token_budget=budget)
    engine = TrainEngine(tiny_model, config)
    expected = engine.gradient(samples)
    gradients = {name: p.grad for name, p in engine.parameters.items()}
    engine.optimizer.zero_grad()
    kept, denominators = prepared(samples, config.cispo, None)
    portions = split(kept, denominators, 2, budget, merge=merge == "tree")
    together = [*rounds(portions), 3, 1]
    assert (max(together[:-2]) > 1) == (budget == 25), "the small budget streams"
    passes, local, loss = Passes(engine.model, engine.tree, weight=2.0), Local(), 0.0
    for portion in portions:
        units = [
            passes.unit(
                micro,
                lambda new, micro=micro: cispo_loss(  # type: ignore[misc]
                    new,
                    micro.rollout_logprobs,
                    micro.advantages,
                    torch.ones_like(new, dtype=torch.bool),
                    micro.denominator,
                    CispoConfig(),
                ),
            )
            for micro in micro_batches(portion, engine)
        ]
        passes.run(units, together, local)
        loss += float(sum(unit.loss for unit in units))
    assert local.announced == ([False] * (sum(together) - 1) + [True]) * 2
    assert loss == pytest.approx(expected.loss, rel=1e-5)
    whole = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm()
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None
        assert (parameter.grad / 2 - gradients[name]).norm() <= 1e-5 * max(gradients[name].norm(), 1e-3 * whole), name


def test_without_deepspeed_the_error_says_what_to_install(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ForgeError, match=r"train\.engine = 'deepspeed'.*pip install 'forge-rl\[deepspeed\]'"):
        ZeroEngine(tiny_model, TrainConfig(), ranks=2, stage=2)


def test_folders_of_dead_trainers_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait()
    for name in (f"forge-ranks-{dead.pid}-a", f"forge-ranks-{os.getpid()}-b", "forge-ranks-old", "other"):
        (tmp_path / name).mkdir()
    clear_abandoned()
    left = sorted(folder.name for folder in tmp_path.iterdir())
    assert left == [f"forge-ranks-{os.getpid()}-b", "forge-ranks-old", "other"]


def test_other_precisions_are_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    with pytest.raises(ForgeError, match=r"train\.dtype = 'float64'"):
        ZeroEngine(tiny_model, TrainConfig(dtype="float64"), ranks=2, stage=2)
