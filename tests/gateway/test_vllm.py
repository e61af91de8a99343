"""vLLM's own server behind the `Engine` protocol and the gateway. Minutes; needs `forge engine install vllm`."""

from __future__ import annotations

import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_many import Spy, at_once, inside, request_of, rows_of
from transformers import AutoModelForCausalLM

from forge.gateway.chat import HfChatCodec
from forge.gateway.constrain import constrainer
from forge.gateway.local import EngineBackend
from forge.live.engine_worker import make_engine
from forge.models import resolve
from forge.rollout.engine import Delta, EngineRequest, Sampling
from forge.rollout.vllm.client import Chunk
from forge.rollout.vllm.engine import VllmEngine
from forge.rollout.vllm.install import found
from forge.scenario import parse

ENVIRONMENT = Path(os.environ.get("FORGE_VLLM", "engines/vllm")).absolute()
INSTALLED = found(ENVIRONMENT)
#: between a float32 server's logprobs and the trainer's model in float32, a token
TOLERANCE = 1e-3

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(INSTALLED.version is None, reason=f"no vLLM: {INSTALLED.why}; forge engine install vllm"),
]


def serve(scratch: Path, *args: str) -> VllmEngine:
    section = {"kind": "vllm", "slots": 32, "max_context": 512}
    vllm = {"environment": str(ENVIRONMENT), "args": list(args)}
    scenario = parse(
        {"name": "t", "stop": {"items": 1}, "domains": [{"name": "calc"}], "engine": section | {"vllm": vllm}}, "test"
    )
    engine = make_engine(scenario, resolve("quickstart"), 0, scratch)
    assert isinstance(engine, VllmEngine)
    return engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    one = serve(tmp_path_factory.mktemp("vllm"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve("quickstart"), local_files_only=True, dtype=torch.float32)


def drain(engine: VllmEngine) -> dict[str, list[Delta]]:
    deltas: defaultdict[str, list[Delta]] = defaultdict(list)
    while sum(engine.load_in_flight):
        for delta in engine.step():
            deltas[delta.id].append(delta)
    return deltas


def ask(engine: VllmEngine, prompts: dict[str, tuple[int, ...]], **sampling: Any) -> dict[str, Delta]:
    for name, prompt in prompts.items():
        engine.add(EngineRequest(id=name, prompt_ids=prompt, sampling=Sampling(**sampling)))
    return {name: whole(deltas) for name, deltas in drain(engine).items()}


def whole(deltas: list[Delta]) -> Delta:
    return Delta(
        id=deltas[0].id,
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        logprobs=tuple(p for d in deltas for p in d.logprobs),
        versions=tuple(v for d in deltas for v in d.versions),
        finish=deltas[-1].finish,
    )


def trainers(model: Any, prompt: tuple[int, ...], sampled: tuple[int, ...], temperature: float = 1.0) -> list[float]:
    """Log probabilities of `sampled` after `prompt`, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sampled]])).logits[0].float() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, sampled, strict=True)]


def prompts(count: int, longest: int = 60) -> dict[str, tuple[int, ...]]:
    draw = random.Random(count)
    return {f"r{i}": tuple(draw.randrange(4, 400) for _ in range(draw.randrange(1, longest))) for i in range(count)}


async def test_what_is_recorded_is_what_vllm_sampled(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 requests of every protocol, streamed or not, with tools or without: no id is lost, doubled or changed."""
    raw: defaultdict[str, list[int]] = defaultdict(list)
    theirs = engine._client.news

    def news(timeout_s: float) -> Any:
        got = theirs(timeout_s)
        for one in got:
            assert isinstance(one, Chunk), one
            raw[one.key].extend(one.token_ids)
        return got

    monkeypatch.setattr(engine._client, "news", news)
    spy = Spy(engine)
    backend = EngineBackend(spy, model="quickstart")
    seen: Counter[str] = Counter()
    async with inside(backend, HfChatCodec(resolve("quickstart"), "hermes"), None) as (client, _):

        async def one(index: int) -> None:
            draw = random.Random(index)
            text = "".join(draw.choices("0123456789+-* abcé", k=draw.randrange(1, 12)))
            path, body = request_of(draw, text, draw.random() < 0.5, draw.random() < 0.5)
            reply = await client.post(f"/t/t{draw.randrange(40)}{path}", json=body)
            assert reply.status_code == 200, reply.text
            seen[path] += 1

        await at_once(500, one)
    backend.close()
    assert len(seen) == 6
    recorded = rows_of(c for session in backend.sessions.open.values() for c in session.completions)
    assert recorded == spy.rows()
    assert recorded.total() >= 500
    assert Counter(tuple(ids) for ids in raw.values()) == Counter(ids for _, ids, *_ in recorded.elements())


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_the_trainers(engine: VllmEngine, model: Any, temperature: float) -> None:
    asked = prompts(40)
    gaps = []
    for name, done in ask(engine, asked, max_tokens=24, temperature=temperature).items():
        expected = trainers(model, asked[name], done.token_ids, temperature or 1.0)
        gaps += [abs(a - b) for a, b in zip(done.logprobs, expected, strict=True)]
    assert len(gaps) == 40 * 24
    assert max(gaps) < TOLERANCE


def test_published_weights_are_served_and_find_no_block_of_others(engine: VllmEngine, tmp_path: Path) -> None:
    prompt = tuple(range(4, 104))
    first = ask(engine, {"a": prompt}, max_tokens=8, temperature=0.0)["a"]
    assert cached_of(engine, prompt) == 96, "the same prompt again is found, in blocks of 32"
    torch.manual_seed(3)
    other = AutoModelForCausalLM.from_pretrained(resolve("quickstart"), local_files_only=True, dtype=torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "other")
    engine.load(tmp_path / "other", engine.version + 1)
    assert cached_of(engine, prompt) == 0
    done = ask(engine, {"a": prompt}, max_tokens=8, temperature=0.0)["a"]
    assert set(done.versions) == {engine.version}
    assert done.logprobs == pytest.approx(trainers(other, prompt, done.token_ids), abs=TOLERANCE)
    engine.load(resolve("quickstart"), engine.version + 1)
    assert cached_of(engine, prompt) == 0
    again = ask(engine, {"a": prompt}, max_tokens=8, temperature=0.0)["a"]
    assert again.token_ids == first.token_ids
    assert again.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)


def cached_of(engine: VllmEngine, prompt: tuple[int, ...]) -> int:
    before = engine.stats.cached_tokens
    ask(engine, {"probe": prompt}, max_tokens=1)
    return engine.stats.cached_tokens - before


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_reach_running_requests(engine: VllmEngine, model: Any, recompute: bool) -> None:
    """The same weights under another version: what was sampled before and after is what the model says of it all."""
    asked, old = prompts(48), engine.version
    for name, prompt in asked.items():
        engine.add(EngineRequest(id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=80)))
    parts: defaultdict[str, list[Delta]] = defaultdict(list)
    loaded = False
    while sum(engine.load_in_flight):
        for delta in engine.step():
            parts[delta.id].append(delta)
        if not loaded and len(parts) > 20:
            engine.load(resolve("quickstart"), old + 1, recompute=recompute)
            loaded = True
    crossed = 0
    for name, prompt in asked.items():
        done = whole(parts[name])
        assert (len(done.token_ids), done.finish) == (80, "length")
        assert list(done.versions) == sorted(done.versions)
        assert set(done.versions) <= {old, old + 1}
        crossed += len(set(done.versions)) == 2
        assert done.logprobs == pytest.approx(trainers(model, prompt, done.token_ids), abs=TOLERANCE)
    assert crossed > 5


def test_seeded_prompts_that_fill_many_steps_do_not_end_the_engine(engine: VllmEngine) -> None:
    """A server that cuts such a prompt into chunks dies of it on a CPU."""
    asked = {f"r{i}": tuple(4 + (i + j) % 390 for j in range(400)) for i in range(32)}
    first = ask(engine, asked, max_tokens=6, seed=5)
    again = ask(engine, asked, max_tokens=6, seed=5)
    assert {n: d.token_ids for n, d in first.items()} == {n: d.token_ids for n, d in again.items()}


def test_drafts_do_not_change_what_is_sampled(tmp_path: Path, model: Any) -> None:
    """Speculation at temperature 1, where vLLM's CPU build alone samples from garbage: about three times this loss."""
    one = serve(tmp_path, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    try:
        prompt = tuple(range(4, 12)) * 4
        done = ask(one, {f"r{i}": prompt for i in range(96)}, max_tokens=40)
    finally:
        one.close()
    assert "replaced" in (tmp_path / "engine-0" / "vllm.log").read_text() or INSTALLED.version != "0.32.0"
    losses = torch.tensor([-sum(trainers(model, prompt, d.token_ids)) / 40 for d in done.values()])
    expected = torch.tensor(sampled_losses(model, prompt, 96, 40))
    error = (losses.var() / 96 + expected.var() / 96).sqrt()
    assert abs(losses.mean() - expected.mean()) < 4 * error, (losses.mean(), expected.mean(), error)


def sampled_losses(model: Any, prompt: tuple[int, ...], count: int, length: int) -> list[float]:
    """Mean loss a token of completions that transformers' logits alone sampled."""
    torch.manual_seed(1)
    ids = torch.tensor([prompt] * count)
    total = torch.zeros(count)
    with torch.no_grad():
        for _ in range(length):
            rows = model(ids).logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(rows.exp(), 1)
            total -= rows.gather(1, token)[:, 0]
            ids = torch.cat([ids, token], 1)
    return (total / length).tolist()


async def test_a_demanded_call_is_made(engine: VllmEngine) -> None:
    """By the grammar that the embedded engine decodes under too, whatever the model would say."""
    codec, model = HfChatCodec(resolve("quickstart"), "template"), resolve("quickstart")
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": schema}}]
    backend = EngineBackend(engine, model="quickstart")
    async with inside(backend, codec, constrain=constrainer(codec, model)) as (client, _):

        async def one(index: int) -> None:
            body = {
                "messages": [{"role": "user", "content": f"{index}*2"}],
                "tools": tools,
                "tool_choice": "required",
                "stream": index % 2 == 1,
            }
            reply = await client.post(f"/t/t{index}/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert "x-forge-unenforced" not in reply.headers
            if index % 2 == 0:
                (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
                assert json.loads(call["function"]["arguments"])["n"] in (1, 2)

        await at_once(16, one)
    backend.close()
    completions = [c for session in backend.sessions.open.values() for c in session.completions]
    assert len(completions) == 16
    for completion in completions:
        assert completion.constrained
        assert codec.text(completion.sampled_ids).startswith("<tool_call>")
