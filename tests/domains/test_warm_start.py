"""The committed policy loads offline and starts where its README says: able, but mostly unsuccessful."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forge.domains.base import Domain, Task, opening
from forge.domains.registry import get_domain
from forge.domains.tools import run_tool
from forge.train.warm_start import (
    DRILL,
    STAGES,
    backward,
    batches,
    demonstrations,
    labels_of,
    learning_rate,
    policy,
    tokenizer,
)

ASSET = Path(__file__).parents[2] / "forge" / "assets" / "quickstart"
OPEN, CLOSE = "<tool_call>", "</tool_call>"


def replies(model: Any, tokens: Any, conversations: list[list[dict[str, Any]]]) -> list[str]:
    """The greedy next turn of each conversation, generated as one left-padded batch."""
    tokens.padding_side = "left"
    batch = tokens.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    batch.pop("token_type_ids", None)
    ids = model.generate(**batch, do_sample=False, max_new_tokens=32)[:, batch["input_ids"].shape[1] :]
    return [tokens.decode(row, skip_special_tokens=True) for row in ids]


def solve(model: Any, tokens: Any, tasks: list[tuple[Domain, Task]]) -> list[float]:
    """Scores of greedy episodes, all advanced together; one that never answers scores 0."""
    scores = [0.0] * len(tasks)
    conversations = {index: opening(task) for index, (_, task) in enumerate(tasks)}
    for _ in range(max(domain.max_turns for domain, _ in tasks)):
        if not conversations:
            break
        said = replies(model, tokens, list(conversations.values()))
        for index, text in zip(list(conversations), said, strict=True):
            domain, task = tasks[index]
            if not (text.startswith(OPEN) and text.endswith(CLOSE)):
                scores[index] = domain.score(task, text)
                del conversations[index]
                continue
            call = json.loads(text.removeprefix(OPEN).removesuffix(CLOSE))
            result, _ = run_tool(domain, task, call["name"], call["arguments"])
            conversations[index] += [
                {"role": "assistant", "content": text},
                {"role": "tool", "content": result},
            ]
    return scores


def test_the_committed_policy_starts_in_the_stated_range() -> None:
    torch.set_num_threads(1)
    tokens = AutoTokenizer.from_pretrained(ASSET, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(ASSET, local_files_only=True)
    assert model.dtype == torch.float32
    assert model.num_parameters() < 1_000_000
    names = ["calc", "chain", "gcd", "products", "shop"]
    domains = [get_domain(name) for name in names]
    tasks = [(domain, domain.task("held_out", 0, index)) for domain in domains for index in range(8)]
    assert 0.1 <= sum(solve(model, tokens, tasks)) / len(tasks) <= 0.5


def test_labels_are_the_assistants_tokens_and_their_end() -> None:
    user, assistant, end = 3, 4, 1
    ids = [user, 9, end, assistant, 7, 8, end, user, 9, end, assistant, 7, end]
    assert labels_of(ids, assistant, end) == [-100] * 4 + [7, 8, end] + [-100] * 4 + [7, end]


@pytest.mark.parametrize("stage", STAGES)
def test_the_learning_rate_warms_up_then_falls_to_the_stated_end(stage: Any) -> None:
    rates = [learning_rate(stage, step) for step in range(stage.steps + 1)]
    assert 0 < rates[0] < rates[20] < max(rates) <= stage.first_lr
    assert rates[-1] == pytest.approx(stage.last_lr)


def test_a_step_sees_every_domain_in_three_micro_batches_and_lowers_its_loss() -> None:
    torch.manual_seed(0)
    tokens = tokenizer()
    model = policy(len(tokens))
    batch = next(batches(STAGES[-1], tokens, 0))
    assert [ids.shape for ids, _ in batch] == [labels.shape for _, labels in batch]
    assert [len(ids) for ids, _ in batch] == [16, 16, 16]
    first = backward(model, batch)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert backward(model, batch) < first


def test_micro_batches_add_up_to_the_mean_over_all_spoken_tokens() -> None:
    torch.manual_seed(0)
    tokens = tokenizer()
    model = policy(len(tokens)).double()
    batch = next(batches(STAGES[-1], tokens, 0))
    longest = max(ids.shape[1] for ids, _ in batch)
    merged = tuple(
        torch.cat(
            [torch.nn.functional.pad(pair[part], (0, longest - pair[part].shape[1]), value=fill) for pair in batch]
        )
        for part, fill in ((0, 0), (1, -100))
    )
    backward(model, batch)
    split = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    backward(model, [(merged[0], merged[1])])
    for parameter, expected in zip(model.parameters(), split, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-9, atol=1e-12)


def test_a_drill_is_repeated_and_fits_the_copying_stage() -> None:
    (stage,) = [stage for stage in STAGES if DRILL in stage.mix and len(stage.mix) == 1]
    user, assistant = next(demonstrations(stage, 0))
    assert user["role"] == "user"
    assert assistant == {"role": "assistant", "content": user["content"]}
