"""Token sequences as agents make them, for benchmarks: one request a turn, each a longer prompt and its completion."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge.types import ForgeError, TrainSample

TAU_BENCH = "tau_bench/gpt-4o-airline.json"


@dataclass(frozen=True, slots=True)
class Workload:
    """What was asked: `requests[g]` are the requests of trajectory g in order, each (prompt ids, completion ids)."""

    name: str
    requests: tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]

    def per_request(self) -> list[TrainSample]:
        """One sample a request: its completion alone carries loss."""
        return [
            sample(g, (*prompt, *completion), [(len(prompt), len(completion))])
            for g, turns in enumerate(self.requests)
            for prompt, completion in turns
        ]

    def per_trajectory(self) -> list[TrainSample]:
        """One sample a trajectory that only appends: every completion carries loss. Raises ForgeError for others."""
        out = []
        for g, turns in enumerate(self.requests):
            whole: tuple[int, ...] = ()
            spans = []
            for prompt, completion in turns:
                if prompt[: len(whole)] != whole:
                    raise ForgeError(f"{self.name}: trajectory {g} rewrites its context; it is not one sequence")
                spans.append((len(prompt), len(completion)))
                whole = (*prompt, *completion)
            out.append(sample(g, whole, spans))
        return out


def sample(group: int, ids: tuple[int, ...], spans: Sequence[tuple[int, int]]) -> TrainSample:
    """Loss on `spans` (first token, tokens); rollout logprobs and advantages that exercise the loss, nothing more."""
    loss, advantages = [False] * len(ids), [0.0] * len(ids)
    for start, count in spans:
        loss[start : start + count] = [True] * count
        advantages[start : start + count] = [1.0 if group % 2 else -1.0] * count
    return TrainSample(
        position=0,
        member=group,
        token_ids=ids,
        loss=tuple(loss),
        logprobs=tuple(-3.0 if on else 0.0 for on in loss),
        advantages=tuple(advantages),
    )


def agents(
    *, turns: int, group: int, prompt: int, step: int, vocabulary: int, compact_every: int | None = None, seed: int = 0
) -> Workload:
    """A prompt group of tool-using agents: `prompt` common tokens; each of `turns` requests appends `step` tokens, half
    of them sampled. `compact_every`: after so many turns the context is folded to the prompt and a summary of one step.
    """
    draw = random.Random(seed)

    def fresh(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    stem, requests = fresh(prompt), []
    for _ in range(group):
        context, own = stem, []
        for turn in range(turns):
            if compact_every and turn and turn % compact_every == 0:
                context = (*stem, *fresh(step))
            asked = (*context, *fresh(step - step // 2))
            completion = fresh(step // 2)
            own.append((asked, completion))
            context = (*asked, *completion)
        requests.append(tuple(own))
    compacted = f", compacted every {compact_every}" if compact_every else ""
    return Workload(f"T={turns} G={group} p={prompt} d={step}{compacted}", tuple(requests))


def chat(vocabulary: int, seed: int = 0) -> Workload:
    """Sixteen plain conversations of three short turns behind a short system prompt."""
    return replace(
        agents(turns=3, group=16, prompt=40, step=120, vocabulary=vocabulary, seed=seed), name="plain chat, 3 turns"
    )


def airline(data: Path, vocabulary: int, choose: Callable[[Any], bool], name: str) -> Workload:
    """Trajectories of tau-bench's airline domain that `choose` picks. Tokens are words and marks, numbered as they
    come and folded into the vocabulary; what repeats in the text repeats in the ids. Raises ForgeError."""
    known: dict[str, int] = {}

    def ids(text: str) -> tuple[int, ...]:
        return tuple(known.setdefault(t, len(known)) % vocabulary for t in re.findall(r"\w+|[^\w\s]", text))

    return Workload(name, tuple(_requests(run["traj"], ids) for run in read_runs(data) if choose(run)))


def read_runs(data: Path) -> list[Any]:
    """tau-bench's runs: each {"task_id", "trial", "traj": [messages], ...}. Raises ForgeError."""
    path = data / TAU_BENCH
    try:
        runs: list[Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ForgeError(f"{path}: {error.strerror}; it is tau-bench's historical_trajectories") from None
    return runs


def _requests(
    messages: Sequence[Any], ids: Callable[[str], tuple[int, ...]]
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    context: tuple[int, ...] = ()
    out = []
    for message in messages:
        said = ids(f"{message.get('content') or ''} {json.dumps(message.get('tool_calls') or '')}")
        if message["role"] == "assistant":
            asked = (*context, *ids("assistant :"))
            out.append((asked, said))
            context = (*asked, *said)
        else:
            context = (*context, *ids(f"{message['role']} :"), *said)
    return tuple(out)
