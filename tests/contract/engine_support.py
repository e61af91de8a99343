"""Tiny models and engines for the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from forge.rollout.engine import Delta, Engine, EngineRequest, Sampling
from forge.rollout.fake_engine import FakeEngine
from forge.rollout.torch_engine import TorchEngine

VOCAB = 40
CONTEXT = 48

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    # Ten times the usual: logits then differ enough that a wrong mask or position shows.
    "initializer_range": 0.2,
}


def make_model(kind: str, seed: int = 0) -> Any:
    """A random model; equal seeds give equal weights. Llama ties its embeddings, Qwen2 does not."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    return model.eval()


@cache
def shared_model(kind: str) -> Any:
    """One model for all engines that never load other weights."""
    return make_model(kind)


@cache
def plain_model(kind: str) -> Any:
    """The same weights, never given to an engine: transformers' own attention and cache, to compare with."""
    return make_model(kind)


def llama(**options: Any) -> Engine:
    return TorchEngine(shared_model("llama"), **{"slots": 4, "max_context": CONTEXT, "prefill_chunk": 16} | options)


def qwen2(**options: Any) -> Engine:
    return TorchEngine(shared_model("qwen2"), **{"slots": 4, "max_context": CONTEXT, "prefill_chunk": 16} | options)


def fake(**options: Any) -> Engine:
    return FakeEngine(**{"slots": 4, "max_context": CONTEXT, "vocab_size": VOCAB} | options)


ENGINES: dict[str, Callable[..., Engine]] = {"llama": llama, "qwen2": qwen2, "fake": fake}


def request(id: str, prompt: tuple[int, ...] = (3, 1, 4), **sampling: Any) -> EngineRequest:
    return EngineRequest(id=id, prompt_ids=prompt, sampling=Sampling(**sampling))


def drain(engine: Engine, limit: int = 1000) -> dict[str, Delta]:
    """Step until idle; each request's deltas joined into one."""
    deltas = []
    for _ in range(limit):
        if engine.load_in_flight == (0, 0):
            return join(deltas)
        deltas += engine.step()
    raise AssertionError(f"still busy after {limit} steps")


def join(deltas: list[Delta]) -> dict[str, Delta]:
    whole: dict[str, Delta] = {}
    for delta in deltas:
        before = whole.get(delta.id, Delta(id=delta.id))
        assert before.finish is None, f"{delta.id} goes on after its end"
        whole[delta.id] = Delta(
            id=delta.id,
            token_ids=before.token_ids + delta.token_ids,
            logprobs=before.logprobs + delta.logprobs,
            versions=before.versions + delta.versions,
            finish=delta.finish,
        )
    return whole


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder
