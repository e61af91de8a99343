"""Very many requests: a few hundred here, ten thousand with `-m slow`. Fuzzed ones, and ones of a real engine."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gateway_support import ScriptedBackend
from test_parsing_laws import BODIES, SAID, check_shape, places, replaced

from forge.gateway.app import create_app
from forge.gateway.backend import Backend
from forge.gateway.chat import ChatCodec, HfChatCodec
from forge.gateway.constrain import constrainer
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.gateway import Gateway
from forge.gateway.local import EngineBackend
from forge.gateway.request import Constrain
from forge.models import resolve
from forge.rollout.engine import Delta, Engine, EngineRequest
from forge.rollout.torch_engine import TorchEngine
from forge.types import Completion

some_and_all = pytest.mark.parametrize(
    "number", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
AT_ONCE = 16
#: what must not take longer has got stuck
STUCK_S = 60.0
JUNK: list[Any] = [
    None, True, 0, -1, 1.5, 10**400, 2**63, "", "x", "\ud800", "auto", "required", "user", "<think>", "forge:/w==",
    [], {}, [None], [[]], ["a"], [{}], [{"type": "text"}], {"type": "function"}, {"role": "user"}, {"a": {"b": [1]}},
    [3] * 40, "y" * 2000,
]  # fmt: skip
#: what a stream of each protocol has at its end alone
ENDS = {
    "/v1/chat/completions": ("data: [DONE]\n\n",),
    "/v1/completions": ("data: [DONE]\n\n",),
    "/v1/responses": ("event: response.completed", "event: response.incomplete"),
    "/v1/messages": ("event: message_stop",),
    "/v1beta/models/m:streamGenerateContent": ('"finishReason"',),
}
TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@asynccontextmanager
async def inside(
    backend: Backend, codec: ChatCodec, constrain: Constrain | None
) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    """A client of an app in this process, which raises what the app raises."""
    app = create_app(backend, codec, retry_grace_s=0, constrain=constrain)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None) as client:
        yield client, app.state.gateway


async def at_once(number: int, one: Callable[[int], Awaitable[None]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def gated(index: int) -> None:
        async with gate, asyncio.timeout(STUCK_S):
            await one(index)

    await asyncio.gather(*map(gated, range(number)))


def fuzzed(draw: random.Random, path: str) -> Any:
    """A valid body with up to four changes: a value of any kind in place of another, a field gone, one twice."""
    body: Any = BODIES[path]
    for _ in range(draw.randrange(5)):
        anywhere = list(places(body))
        if not anywhere:
            return body
        where, kind = draw.choice(anywhere), draw.randrange(3)
        if kind == 0:
            body = replaced(body, where, draw.choice(JUNK))
        else:
            inside = body
            for key in where[:-1]:
                inside = inside[key]
            value = inside[where[-1]]
            other = draw.choice(anywhere) if kind == 1 else where
            changed = [value, value] if kind == 2 else value
            body = replaced(body, other, changed)
    return body


@some_and_all
async def test_fuzzed_requests_are_answered_and_none_is_lost(number: int) -> None:
    backend = ScriptedBackend(lambda _t, _p: SAID, max_context=100_000)
    backend.chunk = 7
    answered: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    paths = list(BODIES)

    folder = resolve("quickstart")
    constrain = constrainer(
        HfChatCodec(folder, "hermes"), folder
    )  # of every constraint the grammar is made, or refused

    async with inside(backend, FakeChatCodec(), constrain) as (client, _):

        async def one(index: int) -> None:
            draw = random.Random(index)
            path, name = draw.choice(paths), f"t{draw.randrange(50)}"
            body = fuzzed(draw, path)
            if isinstance(body, dict) and "stream" in BODIES[path]:
                body = body | {"stream": draw.random() < 0.5}
            reply = await client.post(f"/t/{name}{path}", content=json.dumps(body).encode())
            check_shape(path, reply)
            statuses[reply.status_code] += 1
            if reply.status_code == 200 and "oken" not in path:
                answered[name] += 1
                if path.endswith("streamGenerateContent") or (isinstance(body, dict) and body.get("stream") is True):
                    assert any(end in reply.text for end in ENDS[path]), (path, body, reply.text[-300:])

        await at_once(number, one)
    assert statuses[200] > number / 5
    assert statuses[400] > number / 5
    # Also one that was ended early, at its first call or a stop string, is a record.
    assert sum(map(len, backend.records.values())) == len(backend.samplings)
    for name, count in answered.items():
        records = backend.records[name]
        assert len(records) >= count
        assert sorted(record.index for record in records) == list(range(len(records)))


class Spy:
    """An engine, and what it was asked and sampled, request by request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.asked: dict[str, tuple[int, ...]] = {}
        self.sampled: defaultdict[str, list[Delta]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: EngineRequest) -> None:
        self._engine.add(request)
        self.asked[request.id] = request.prompt_ids

    def step(self) -> list[Delta]:
        deltas = self._engine.step()
        for delta in deltas:
            self.sampled[delta.id].append(delta)
        return deltas

    def rows(self) -> Counter[tuple[Any, ...]]:
        return Counter(
            (
                self.asked[key],
                tuple(i for d in deltas for i in d.token_ids),
                tuple(p for d in deltas for p in d.logprobs),
                tuple(v for d in deltas for v in d.versions),
                deltas[-1].finish,
            )
            for key, deltas in self.sampled.items()
        )


def rows_of(completions: Iterable[Completion]) -> Counter[tuple[Any, ...]]:
    return Counter((c.prompt_ids, c.sampled_ids, c.logprobs, c.versions, c.finish) for c in completions)


def request_of(draw: random.Random, text: str, tools: bool, stream: bool) -> tuple[str, dict[str, Any]]:
    """One of every protocol, with a history of its own."""
    size, past = draw.randrange(1, 12), [{"role": "user", "content": text}]
    if draw.random() < 0.5:
        past += [{"role": "assistant", "content": "3 + 4"}, {"role": "user", "content": text[::-1]}]
    match draw.randrange(5):
        case 0:
            body: dict[str, Any] = {"messages": past, "max_tokens": size, "stream": stream, "n": draw.randrange(1, 3)}
            forced = {"tool_choice": "required"} if draw.random() < 0.3 else {}
            form = {"response_format": {"type": "json_object"}} if draw.random() < 0.2 else {}
            called = {"tools": [{"type": "function", "function": TOOL}]} | forced
            return "/v1/chat/completions", body | form | (called if tools else {})
        case 1:
            return "/v1/completions", {"prompt": [text, "b"], "max_tokens": size, "stream": stream}
        case 2:
            body = {"input": past, "max_output_tokens": size, "stream": stream}
            return "/v1/responses", body | ({"tools": [{"type": "function", **TOOL}]} if tools else {})
        case 3:
            schema = {"name": "f", "input_schema": TOOL["parameters"]}
            body = {"messages": past, "max_tokens": size, "stream": stream}
            return "/v1/messages", body | ({"tools": [schema]} if tools else {})
    roles = {"user": "user", "assistant": "model"}
    contents = [{"role": roles[m["role"]], "parts": [{"text": m["content"]}]} for m in past]
    body = {"contents": contents, "generationConfig": {"maxOutputTokens": size}}
    verb = "streamGenerateContent" if stream else "generateContent"
    return f"/v1beta/models/m:{verb}", body | ({"tools": [{"functionDeclarations": [TOOL]}]} if tools else {})


@some_and_all
async def test_what_is_recorded_is_what_the_engine_saw_and_sampled(number: int) -> None:
    """The embedded engine, which ships with its model: every protocol, streamed or not, with tools or without."""
    folder = resolve("quickstart")
    spy = Spy(TorchEngine(folder, slots=16, max_context=512))
    backend = EngineBackend(spy, model="quickstart")
    seen: Counter[str] = Counter()
    codec = HfChatCodec(folder, "hermes")
    async with inside(backend, codec, constrainer(codec, folder)) as (client, _):

        async def one(index: int) -> None:
            draw = random.Random(index)
            text = "".join(draw.choices("0123456789+-* abcé", k=draw.randrange(1, 12)))
            path, body = request_of(draw, text, draw.random() < 0.5, draw.random() < 0.5)
            reply = await client.post(f"/t/t{draw.randrange(40)}{path}", json=body)
            assert reply.status_code == 200, reply.text
            seen[path] += 1

        await at_once(number, one)
    backend.close()
    assert len(seen) == 6
    records = [c for session in backend.sessions.open.values() for c in session.completions]
    assert sum(c.constrained for c in records) > number / 40
    recorded = rows_of(records)
    assert recorded == spy.rows()
    assert recorded.total() >= number
