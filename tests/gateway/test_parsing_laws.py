"""Whatever a client sends is answered, or refused in its protocol's shape with what is wrong: never a fault of ours."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from gateway_support import ScriptedBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.gateway.app import create_app
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.tool_format import ToolCall, render

SAID = "<think>hm</think>" + render("ok", [ToolCall("f", '{"a": 1}'), ToolCall("g", '{"input": 2}')])
SCHEMA = {"type": "object", "properties": {"a": {"type": "INTEGER"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}

#: a body of every protocol that uses most of what it knows
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "m", "n": 2, "stream": False, "stream_options": {"include_usage": True}, "logprobs": True, "stop": "z",
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "u", "name": "n"},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": True, "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_completion_tokens": 9, "temperature": 1, "top_p": 1, "seed": 3, "logit_bias": {}, "top_logprobs": 0,
    },
    "/v1/completions": {
        "model": "m", "prompt": ["abc", "b"], "n": 1, "logprobs": 0, "stream": False, "max_tokens": 5, "best_of": 1,
        "echo": False, "suffix": None, "stop": "z", "temperature": 0, "stream_options": {"include_usage": True},
    },
    "/v1/responses": {
        "model": "m", "instructions": "i", "stream": False, "store": True, "previous_response_id": None,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "s"}]},
            {"role": "user", "content": "u"},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "t"}],
             "encrypted_content": "forge:aGk="},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o"}]},
            {"type": "function_call", "call_id": "c", "namespace": "n", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "y"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g"}, {"type": "web_search"},
                  {"type": "namespace", "name": "n", "tools": [{"type": "function", **FUNCTION}]}],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_object"}}, "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["reasoning.encrypted_content"], "max_output_tokens": 9, "metadata": {"k": "v"},
        "truncation": "auto",
    },
    "/v1/messages": {
        "model": "m", "max_tokens": 9, "stream": False, "system": [{"type": "text", "text": "s"}], "top_k": 3,
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "o"}, {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]},
                {"type": "document", "title": "d", "source": {"type": "text", "data": "x"}}]},
            {"role": "system", "content": "reminder"},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "bash"}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}, "stop_sequences": ["zz"],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "temperature": 1, "top_p": 0.5,
    },
    "/v1beta/models/m:generateContent": {
        "systemInstruction": {"parts": [{"text": "s"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "u"}]},
            {"role": "model", "parts": [
                {"text": "t", "thought": True}, {"functionCall": {"name": "f", "args": {"a": 1}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"output": "3"}}}]},
        ],
        "tools": [{"functionDeclarations": [FUNCTION]}, {"google_search": {}}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {"temperature": 0, "topP": 1, "topK": 4, "maxOutputTokens": 9, "stopSequences": ["z"],
                             "candidateCount": 1, "seed": 1, "responseSchema": SCHEMA},
    },
}  # fmt: skip
BODIES["/v1beta/models/m:streamGenerateContent"] = BODIES["/v1beta/models/m:generateContent"]
BODIES["/v1beta/models/m:countTokens"] = BODIES["/v1beta/models/m:generateContent"]
BODIES["/v1/messages/count_tokens"] = BODIES["/v1/messages"]
BODIES["/v1/responses/input_tokens"] = BODIES["/v1/responses"]

junk = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([10**400, -1e308, 0.5]) | st.text(max_size=3)
    | st.sampled_from(["\ud800", "auto", "required", "text", "function", "<think>", "forge:/w==", "user", "assistant"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything inside a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from places(one, (*path, key))


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """The body with something else at a path; what a change before it has taken away stays away."""
    body = copy.deepcopy(body)
    at = body
    for key in path[:-1]:
        try:
            at = at[key]
        except (KeyError, IndexError, TypeError):
            return body
    if isinstance(at, dict) or (isinstance(at, list) and isinstance(path[-1], int) and path[-1] < len(at)):
        at[path[-1]] = value
    return body


async def ask(path: str, content: bytes, max_context: int = 100_000) -> httpx.Response:
    app = create_app(ScriptedBackend(lambda _t, _p: SAID, max_context=max_context), FakeChatCodec())
    transport = httpx.ASGITransport(app)  # raises what the app raises
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(f"/t/t1{path}", content=content)


def check_shape(path: str, reply: httpx.Response) -> None:
    assert reply.status_code < 500, reply.text
    if reply.status_code == 200:
        return
    body = reply.json()
    told = body["error"]
    assert told["message"]
    if "v1beta" in path:
        assert told["code"] == reply.status_code
    elif "messages" in path:
        assert (body["type"], bool(told["type"])) == ("error", True)
    else:
        assert {"type", "param", "code"} <= set(told)


@pytest.mark.parametrize("path", BODIES)
def test_the_bodies_are_valid(path: str) -> None:
    reply = asyncio.run(ask(path, json.dumps(BODIES[path]).encode()))
    assert reply.status_code == 200, reply.text
    if "stream" in BODIES[path]:
        streamed = asyncio.run(ask(path, json.dumps(BODIES[path] | {"stream": True}).encode()))
        assert streamed.status_code == 200


@pytest.mark.parametrize("path", BODIES)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_change_of_a_body_is_answered(path: str, data: st.DataObject) -> None:
    body: Any = BODIES[path]
    for where in data.draw(st.lists(st.sampled_from(list(places(body))), min_size=1, max_size=3)):
        body = replaced(body, where, data.draw(junk))
    stream = data.draw(st.booleans())
    body = body | {"stream": True} if stream and "v1beta" not in path else body
    check_shape(path, asyncio.run(ask(path, json.dumps(body).encode())))


@pytest.mark.parametrize("path", BODIES)
@settings(deadline=None, max_examples=20)
@given(junk.map(json.dumps).map(str.encode) | st.binary(max_size=20))
def test_anything_else_is_refused(path: str, content: bytes) -> None:
    reply = asyncio.run(ask(path, content))
    assert reply.status_code == 400
    check_shape(path, reply)


@pytest.mark.parametrize("path", BODIES)
def test_depth_and_length_are_refused_too(path: str) -> None:
    anywhere = list(places(BODIES[path]))
    for depth, somewhere in ((150, anywhere), (450, anywhere), (100_000, anywhere[:1])):
        deep = '{"type":"OBJECT","a":[' * depth + "1" + "]}" * depth
        for where in somewhere:
            text = json.dumps(replaced(BODIES[path], where, "DEEP")).replace('"DEEP"', deep)
            check_shape(path, asyncio.run(ask(path, text.encode())))
    long = asyncio.run(ask(path, json.dumps(BODIES[path]).encode(), max_context=3))
    assert long.status_code == (200 if "oken" in path else 400)
    check_shape(path, long)
