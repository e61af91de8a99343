"""A tiny Llama for the trainer's tests, and samples whose rollout logprobs it nearly agrees with."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forge.types import TrainSample

VOCAB = 24


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer Llama with tied embeddings, and a tokenizer file to be copied along."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.3,  # wide, so that its distribution is far from flat and gradients are not tiny
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="session")
def make_samples() -> Callable[..., list[TrainSample]]:
    """Random samples in groups of four, several sampled spans each, lengths 4 to 40. `shared` is the share of them
    that go on from a prefix of an earlier one."""

    def make(
        seed: int, count: int, *, zero: float = 0.25, temperature: float | None = None, shared: float = 0.0
    ) -> list[TrainSample]:
        draw = random.Random(seed)
        samples: list[TrainSample] = []
        for i in range(count):
            length = draw.randint(4, 40)
            stem: tuple[int, ...] = ()
            if samples and draw.random() < shared:
                earlier = draw.choice(samples).token_ids
                stem = earlier[: draw.randint(0, min(length, len(earlier)))]
            loss = [False, *(draw.random() < 0.5 for _ in range(length - 2)), True]
            advantage = 0.0 if draw.random() < zero else draw.gauss(0.0, 1.0)
            samples.append(
                TrainSample(
                    position=i // 4,
                    member=i % 4,
                    token_ids=stem + tuple(draw.randrange(VOCAB) for _ in range(length - len(stem))),
                    loss=tuple(loss),
                    logprobs=tuple(-draw.uniform(0.5, 6.0) if on else 0.0 for on in loss),
                    advantages=tuple(advantage if on else 0.0 for on in loss),
                    temperature=temperature or draw.choice((1.0, 0.7)),
                )
            )
        return samples

    return make
