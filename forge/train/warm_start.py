"""Build the quickstart's tokenizer and policy from nothing: `python -m forge.train.warm_start --out DIR`.

Supervised steps in three stages: copying drills; perfect experts on train tasks, because only finished calls teach
the model to copy keys and numbers into them; then the sloppy experts on train tasks, so that the policy that
reinforcement learning starts from can do the tasks but mostly does not. About eleven minutes on one core. One seed
is one sequence of batches; the weights also depend on the machine and the torch version in their last digits.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forge.agents.experts import GIVE_UP, PERFECT, SLOPPY, Sloppiness, demonstrate
from forge.domains.registry import PURE
from forge.domains.shop import ITEMS
from forge.domains.tokenizer import ASSISTANT, CONTEXT, END, build_tokenizer, words_of

_BATCH = 48
_MICRO = 16  # rows forwarded together, of like length: padding falls from a half to a sixth
_WARM_UP = 40
_IGNORED = -100


#: the name in a mix of copying drills, which are no domain: the assistant repeats a random string of pieces
DRILL = "drill"
_PIECES = (*ITEMS, *(str(number) for number in range(100)), *"abcdefghijklmnopqrstuvwxyz+-*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`steps` optimiser steps on demonstrations of one kind, domains drawn by `mix` (name -> weight)."""

    name: str
    steps: int
    first_lr: float
    last_lr: float
    sloppiness: Sloppiness
    mix: dict[str, float]


STAGES = (
    Stage(name="copying", steps=300, first_lr=2e-3, last_lr=1.5e-3, sloppiness=PERFECT, mix={DRILL: 1.0}),
    Stage(
        name="skills",
        steps=600,
        first_lr=2e-3,
        last_lr=2e-4,
        sloppiness=PERFECT,
        mix={DRILL: 0.1, "calc": 0.3, "products": 0.1, "chain": 0.15, "shop": 0.3, "gcd": 0.05},
    ),
    Stage(
        name="sloppiness",
        steps=200,
        first_lr=6e-4,
        last_lr=1e-4,
        sloppiness=SLOPPY,
        mix={"calc": 0.2, "products": 0.15, "chain": 0.25, "shop": 0.3, "gcd": 0.1},
    ),
)


def tokenizer() -> PreTrainedTokenizerFast:
    """The vocabulary: the words of 50 train prompts a domain, of the shop, of the tools and of their errors."""
    spoken = ["calc", "expression", "lookup", "key", GIVE_UP, "error: no such key", "error: bad expression"]
    prompts = [PURE[name]().task("train", 0, index).prompt for name in PURE for index in range(50)]
    # Items stand alone here, so that each is a word without a leading space.
    return build_tokenizer(words_of([*prompts, *ITEMS, *spoken]))


def policy(vocabulary: int) -> LlamaForCausalLM:
    """A fresh Llama of 0.83 million parameters."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        # 1/sqrt(width). At the default 0.02, and without drills, copying had not formed after 300 steps of 32 (the
        # two were changed together, so which of them helped is not known).
        initializer_range=0.088,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def drill(rng: Random) -> list[dict[str, object]]:
    """A conversation whose whole answer is copied, where a task has a few copied tokens: a denser signal."""
    text = "+".join(rng.choices(_PIECES, k=rng.randint(3, 14)))
    return [{"role": "user", "content": text}, {"role": "assistant", "content": text}]


def demonstrations(stage: Stage, seed: int) -> Iterator[list[dict[str, object]]]:
    """Conversations of train tasks without end; no task index comes twice within a domain."""
    rng = Random(seed)
    domains = {name: PURE[name]() for name in stage.mix if name != DRILL}
    used = dict.fromkeys(domains, 0)
    while True:
        (name,) = rng.choices(list(stage.mix), list(stage.mix.values()))
        if name == DRILL:
            yield drill(rng)
            continue
        task = domains[name].task("train", seed, used[name])
        used[name] += 1
        yield demonstrate(domains[name], task, rng, stage.sloppiness)


def labels_of(ids: Sequence[int], assistant: int, end: int) -> list[int]:
    """Targets per position: the assistant's tokens including its end token; everything else is ignored."""
    labels, speaking = [], False
    for token in ids:
        labels.append(token if speaking else _IGNORED)
        speaking = token == assistant or (speaking and token != end)
    return labels


Batch = list[tuple[torch.Tensor, torch.Tensor]]


def batches(stage: Stage, tokens: PreTrainedTokenizerFast, seed: int) -> Iterator[Batch]:
    """One optimiser step each: 3 micro-batches of (ids, labels), both [16, longest] int64.

    Right-padded: causal attention needs no mask for that. A step mixes all domains; only its micro-batches are sorted
    by length, which is nearly by domain.
    """
    source = demonstrations(stage, seed)
    assistant, end = tokens.convert_tokens_to_ids([ASSISTANT, END])
    while True:
        rows = [tokens.apply_chat_template(next(source), return_dict=False) for _ in range(_BATCH)]
        rows.sort(key=len)
        yield [padded(rows[start : start + _MICRO], assistant, end) for start in range(0, _BATCH, _MICRO)]


def padded(rows: Sequence[Sequence[int]], assistant: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids as (ids, labels), both [rows, longest] int64."""
    shape = (len(rows), max(map(len, rows)))
    ids = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, _IGNORED, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
        labels[index, : len(row)] = torch.tensor(labels_of(row, assistant, end))
    return ids, labels


def learning_rate(stage: Stage, step: int) -> float:
    """A short linear warm-up, then a cosine from the stage's first rate to its last."""
    warm_up = min(1.0, (step + 1) / _WARM_UP)
    cosine = 0.5 * (1 + math.cos(math.pi * step / stage.steps))
    return warm_up * (stage.last_lr + (stage.first_lr - stage.last_lr) * cosine)


def backward(model: LlamaForCausalLM, batch: Batch) -> float:
    """Accumulate gradients of the mean cross-entropy over all the assistant's tokens in `batch`; returns that mean.

    The head runs on those positions alone, a third of all.
    """
    count = sum(int((labels[:, 1:] != _IGNORED).sum()) for _, labels in batch)
    mean = 0.0
    for ids, labels in batch:
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        targets = labels[:, 1:]
        spoken = targets != _IGNORED
        loss = functional.cross_entropy(model.lm_head(hidden[spoken]), targets[spoken], reduction="sum") / count
        loss.backward()
        mean += loss.item()
    return mean


def train(
    model: LlamaForCausalLM,
    tokens: PreTrainedTokenizerFast,
    stage: Stage,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """The stage's AdamW steps, gradients clipped at norm 1; `report(step, loss)` after each."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=stage.first_lr, betas=(0.9, 0.95), weight_decay=0.01)
    source = batches(stage, tokens, seed)
    for step in range(stage.steps):
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(stage, step)
        optimiser.zero_grad(set_to_none=True)
        loss = backward(model, next(source))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        report(step, loss)


def train_with_bars(model: LlamaForCausalLM, tokens: PreTrainedTokenizerFast, seed: int) -> None:
    """Every stage in turn, with a progress bar and the present loss."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for number, stage in enumerate(STAGES):
            bar = progress.add_task(stage.name, total=stage.steps)

            def report(step: int, loss: float, bar: TaskID = bar, name: str = stage.name) -> None:
                progress.update(bar, completed=step + 1, description=f"{name}: loss {loss:.3f}")

            train(model, tokens, stage, seed + number, report)


def build(out: Path, seed: int) -> None:
    """Write tokenizer, chat template, configuration and weights to `out` as a Hugging Face folder."""
    torch.manual_seed(seed)
    # One thread: on a shared machine a second one makes these small kernels slower, and the sums would depend on it.
    torch.set_num_threads(1)
    tokens = tokenizer()
    model = policy(len(tokens))
    train_with_bars(model, tokens, seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokens.eos_token_id, pad_token_id=tokens.pad_token_id, max_new_tokens=32
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokens.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m forge.train.warm_start", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write (made if absent)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and demonstrations (default 0)")
    options = parser.parse_args()
    build(options.out, options.seed)


if __name__ == "__main__":
    main()
