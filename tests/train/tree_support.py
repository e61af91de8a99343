"""Models, losses and forests for the equivalence tests of the merged forward."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

VOCAB = 13

Terms = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@cache
def model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A two-layer causal LM with wide weights, so that attention is far from flat; in eval mode."""
    import transformers as hf

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    made: Any
    match kind:
        case "llama-mha-tied":
            made = hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=4, tie_word_embeddings=True))
        case "llama-mqa":
            made = hf.LlamaForCausalLM(hf.LlamaConfig(**common, num_key_value_heads=1))
        case "qwen3-gqa":
            made = hf.Qwen3ForCausalLM(hf.Qwen3Config(**common, num_key_value_heads=2, head_dim=8))
        case "mistral-window":
            made = hf.MistralForCausalLM(
                hf.MistralConfig(**common, num_key_value_heads=2, head_dim=8, sliding_window=5)
            )
        case "qwen2-mixed":  # sliding and full layers in one model
            config = hf.Qwen2Config(
                **common, num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=1
            )
            made = hf.Qwen2ForCausalLM(config)
        case "gpt2":
            size = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
            config = hf.GPT2Config(**size, initializer_range=0.3, bos_token_id=None, eos_token_id=None)
            made = hf.GPT2LMHeadModel(config)
        case "mixtral-moe":
            moe = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
            made = hf.MixtralForCausalLM(hf.MixtralConfig(**common, num_key_value_heads=2, head_dim=8, **moe))
        case _:
            raise KeyError(kind)
    if kind == "mixtral-moe":
        made.set_experts_implementation("eager")  # the grouped kernel knows no float64
    return made.to(dtype).eval()


KINDS = ("llama-mha-tied", "llama-mqa", "qwen3-gqa", "mistral-window", "qwen2-mixed", "gpt2", "mixtral-moe")


def losses(seed: int) -> dict[str, Terms]:
    """Loss terms that weigh tokens in the ways trainers do. Old logprobs and advantages are a seeded function of the
    token's place, so both paths see the same."""

    def drawn(logprobs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        shapes = [one.shape for one in logprobs]
        old = [-3 * torch.rand(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        gains = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return old, gains

    def sft(logprobs: Sequence[Tensor]) -> list[Tensor]:
        return [-one for one in logprobs]

    def per_sequence(logprobs: Sequence[Tensor]) -> list[Tensor]:
        return [-one / max(1, len(one)) for one in logprobs]

    def grpo(logprobs: Sequence[Tensor]) -> list[Tensor]:
        terms = []
        for one, old, gain in zip(logprobs, *drawn(logprobs), strict=True):
            ratio = torch.exp(one - old.to(one))
            terms.append(-torch.minimum(ratio * gain.to(one), ratio.clamp(0.8, 1.2) * gain.to(one)))
        return terms

    def cispo(logprobs: Sequence[Tensor]) -> list[Tensor]:
        total = max(1, sum(len(one) for one in logprobs))
        old_and_gain = zip(logprobs, *drawn(logprobs), strict=True)
        return [
            -torch.exp(one - old.to(one)).clamp(max=5.0).detach() * gain.to(one) * one / total
            for one, old, gain in old_and_gain
        ]

    def gspo(logprobs: Sequence[Tensor]) -> list[Tensor]:  # a ratio of whole sequences: no sum over tokens
        terms = []
        for one, old, gain in zip(logprobs, *drawn(logprobs), strict=True):
            if len(one):
                ratio = torch.exp((one - old.to(one)).mean())
                terms.append(-(ratio * gain.to(one).mean())[None])
        return terms

    return {"sft": sft, "per_sequence": per_sequence, "grpo": grpo, "cispo": cispo, "gspo": gspo}


def grown(seed: int, count: int = 8, longest: int = 40) -> list[list[int]]:
    """Sequences as agents make them: copies of earlier ones, cut somewhere and gone on otherwise."""
    draw = random.Random(seed)
    out: list[list[int]] = []
    for _ in range(count):
        start: list[int] = []
        if out and draw.random() < 0.8:
            start = draw.choice(out)
            start = start[: draw.randint(0, len(start))]
        room = longest - len(start)
        out.append(start + [draw.randrange(VOCAB) for _ in range(draw.randint(0, room))])
    return out


#: forests whose faults the controls must catch: (name, sequences)
CORPUS = [
    ("fork", [[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 8, 9, 1]]),
    ("group", [[1, 2, 3, 4, *[5 + i, 1, 2 + i]] for i in range(6)]),
    ("nested", [[3, 1, 4, 1, 5, 9][:n] for n in range(2, 7)] + [[3, 1, 2, 7]]),
    ("two roots", [[1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9], [7, 8, 1]]),
    ("agents", grown(5, 10)),
]
