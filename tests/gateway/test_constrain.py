"""Demanded calls and formats, kept by an engine that decodes under a grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gateway_support import Live, live

from forge import formats
from forge.formats import ToolFormat
from forge.gateway.chat import HfChatCodec
from forge.gateway.constrain import constrainer, grammar_of
from forge.gateway.conversation import tool
from forge.gateway.local import EngineBackend
from forge.gateway.reasoning import ReasoningStream
from forge.gateway.request import Constraint, Request
from forge.models import resolve
from forge.rollout.engine import EngineRequest, Sampling
from forge.rollout.grammar import Grammars
from forge.rollout.torch_engine import TorchEngine
from forge.types import Json

llguidance = pytest.importorskip("llguidance")
FOLDER = resolve("quickstart")
TOKENS = HfChatCodec(FOLDER).added_tokens
DIGIT: Json = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = tool("add", "d", {"type": "object", "properties": {"a": DIGIT, "b": DIGIT}, "required": ["a", "b"],
                        "additionalProperties": False})  # fmt: skip
SAY = tool("say", None, {"$ref": "#/$defs/said", "$defs": {"said": {
    "type": "object", "properties": {"word": {"enum": ["ja", "nö", 'q"']}}, "required": ["word"]}}})  # fmt: skip
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"],
          "additionalProperties": False}  # fmt: skip
HELLO = [{"role": "user", "content": "3 + 4"}]


@asynccontextmanager
async def served(*, kept: bool = True, tool_prompt: str = "template") -> AsyncIterator[tuple[Live, EngineBackend]]:
    """The model that ships, behind the gateway."""
    codec = HfChatCodec(FOLDER, tool_prompt)
    backend = EngineBackend(TorchEngine(FOLDER, slots=8, max_context=1024), model="quickstart")
    try:
        async with live(backend, codec, constrain=constrainer(codec, FOLDER) if kept else None) as server:
            yield server, backend
    finally:
        backend.close()


async def ask(server: Live, path: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{server.url}/t/t1{path}", json={"messages": HELLO, "max_tokens": 300} | body)


def calls_of(reply: httpx.Response) -> list[Json]:
    calls = reply.json()["choices"][0]["message"].get("tool_calls") or []
    return [call["function"] for call in calls]


@pytest.mark.parametrize("kept", [True, False])
async def test_a_demanded_call_is_one(kept: bool) -> None:
    """Of a model that seldom calls these; without the grammar some of the draws must fail."""
    async with served(kept=kept) as (server, _):
        demand = {"tools": [ADD, SAY], "tool_choice": "required", "parallel_tool_calls": False}
        replies = [await ask(server, "/v1/chat/completions", seed=seed, **demand) for seed in range(4)]
    assert [reply.headers.get("x-forge-unenforced") for reply in replies] == [None if kept else "tool_choice"] * 4
    good = [bool(calls) and all(map(is_sound, calls)) for calls in map(calls_of, replies)]
    assert all(good) == kept


def is_sound(call: Json) -> bool:
    given = json.loads(call["arguments"])
    if call["name"] == "say":
        return given["word"] in ("ja", "nö", 'q"')
    return call["name"] == "add" and set(given) == {"a", "b"} and all(one in range(10) for one in given.values())


async def test_a_named_tool_is_called_in_a_stream_and_over_messages() -> None:
    async with served(tool_prompt="hermes") as (server, backend):
        named = {"type": "function", "function": {"name": "say"}}
        async with server.client() as client:
            stream = await client.chat.completions.create(
                model="m", messages=HELLO, tools=[ADD, SAY], tool_choice=named, stream=True, max_tokens=300,
                parallel_tool_calls=False,
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
        names = [c.function.name for k in chunks for c in k.choices[0].delta.tool_calls or () if c.function.name]
        assert names == ["say"]
        add = {"name": "add", "input_schema": ADD["function"]["parameters"]}
        choice = {"type": "any", "disable_parallel_tool_use": True}
        reply = await ask(server, "/v1/messages", tools=[add], tool_choice=choice)
        assert [block["name"] for block in reply.json()["content"] if block["type"] == "tool_use"] == ["add"]
        assert reply.json()["stop_reason"] == "tool_use"
    records = backend.sessions.open["t1"].completions
    assert all(record.constrained for record in records)
    # All but one way on is closed most of the time, and such a token is told by its logprob.
    assert all(sum(one == 0.0 for one in record.logprobs) > len(record.logprobs) / 2 for record in records)


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": COLOUR}}])
async def test_a_demanded_format_is_kept(form: Json) -> None:
    async with served() as (server, _):
        replies = [
            await ask(server, "/v1/chat/completions", seed=seed, response_format=form, max_tokens=60)
            for seed in range(3)
        ]
    for reply in replies:
        assert "x-forge-unenforced" not in reply.headers
        choice = reply.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            value = json.loads(choice["message"]["content"])
            assert isinstance(value, dict)
            assert form["type"] == "json_object" or value["colour"] in ("red", "blue")
    assert form["type"] == "json_object" or all(r.json()["choices"][0]["finish_reason"] == "stop" for r in replies)


def unkept() -> Iterator[tuple[Constraint, Request, str]]:
    forced = Constraint(field="tool_choice", calls=True)
    asked = Request(tools=[ADD], calls_allowed=True)
    yield forced, asked, "xml"  # a family without a grammar here
    yield forced, Request(tools=[tool("f", None, {"type": "array"})], calls_allowed=True), "hermes"
    yield Constraint(field="response_format", schema={"type": "no such type"}), Request(), "hermes"


@pytest.mark.parametrize(("constraint", "request_", "format_"), list(unkept()))
def test_what_has_no_grammar_is_said_not_to_be_kept(constraint: Constraint, request_: Request, format_: str) -> None:
    constrain = constrainer(HfChatCodec(FOLDER, format_), FOLDER)
    assert constrain is not None
    assert constrain(constraint, request_, (3, 4)) is None


THOUGHTFUL = [(None, "", False), (False, "", False), (False, "<think>a\nb</think>\n", False),
              (True, "a < b\n</think>\n", True)]  # fmt: skip


@pytest.mark.parametrize(("opened", "thought", "needs"), THOUGHTFUL)
@pytest.mark.parametrize("name", ["hermes", "hermes:space=spaced,pad=yes", "hermes:keys=tool/args,tag=tool_use"])
def test_what_a_format_renders_is_in_its_grammar(opened: bool | None, thought: str, needs: bool, name: str) -> None:
    """And the grammar takes no other tool, no text before, no end in the middle."""
    one: ToolFormat = formats.get(name)
    request = Request(tools=[ADD, SAY], calls_allowed=True)
    stream = None if opened is None else ReasoningStream(opened=opened)
    grammar = grammar_of(Constraint(field="tool_choice", calls=True), request, one, stream, TOKENS)
    assert grammar is not None
    calls = [formats.ToolCall("add", '{"a": 1, "b":2}'), formats.ToolCall("say", '{"word": "nö"}')]
    text = thought + one.render("", calls)
    assert accepts(grammar, text)
    assert accepts(grammar, one.render("", calls)) is not needs
    assert not accepts(grammar, thought + "so: " + one.render("", calls))
    assert not accepts(grammar, text[:-1])
    assert not accepts(grammar, thought + one.render("", [formats.ToolCall("sub", "{}")]))
    assert not accepts(grammar, thought + one.render("", [formats.ToolCall("add", '{"a": 1, "b": 22}')]))


def test_json_or_a_call_where_tools_are_offered() -> None:
    one = formats.get("hermes")
    grammar = grammar_of(
        Constraint(field="response_format", schema=COLOUR), Request(tools=[ADD], calls_allowed=True), one, None, TOKENS
    )
    assert grammar is not None
    assert accepts(grammar, '{"colour": "red"}')
    assert accepts(grammar, one.render("", [formats.ToolCall("add", '{"a":1,"b":2}')]))
    assert not accepts(grammar, '{"colour": "green"}')


def accepts(grammar: str, text: str) -> bool:
    """Whether the text, and nothing after it, is a sentence of it."""
    codec, size = HfChatCodec(FOLDER), json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    end = codec.stop_ids[0]
    grammars = Grammars(FOLDER, size)
    assert grammars.fault(grammar) == ""
    matcher = grammars.matcher(Sampling(stop_ids=(end,), grammar=grammar))
    assert matcher is not None
    for token in codec.encode(text):
        if matcher.forbidden(size)[token]:
            return False
        matcher.take(token)
    return not matcher.forbidden(size)[end]


def test_logprobs_are_those_of_what_the_grammar_allows() -> None:
    """Two answers are allowed: their probabilities sum to one, in the ratio that the model gives them."""
    engine, codec = TorchEngine(FOLDER), HfChatCodec(FOLDER)
    prompt = codec.prompt(HELLO, ())
    seen: dict[int, float] = {}
    for seed in range(12):
        sampling = Sampling(max_tokens=4, stop_ids=codec.stop_ids, seed=seed, grammar='start: "7" | "8"')
        engine.add(EngineRequest(id=f"r{seed}", prompt_ids=prompt, sampling=sampling))
    free = dict.fromkeys((*codec.encode("7"), *codec.encode("8")), 0.0)
    while any(engine.load_in_flight):
        for delta in engine.step():
            if delta.finish is None:
                seen[delta.token_ids[0]] = delta.logprobs[0]
            else:
                assert (delta.token_ids, delta.logprobs, delta.finish) == ((codec.stop_ids[0],), (0.0,), "stop")
    assert set(seen) <= set(free)
    if len(seen) == 2:
        assert sum(2.718281828**one for one in seen.values()) == pytest.approx(1.0, abs=1e-4)
