"""Gemini's generateContent over plain HTTP, as gemini-cli speaks it."""

from __future__ import annotations

import json

import httpx
import pytest
from gateway_support import ScriptedBackend, live

from forge.gateway.backend import Overloaded
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.tool_format import ToolCall, render

KEY = {"x-goog-api-key": "t1"}
SAID = "<think>\nsums\n</think>\n\n" + render("Let me see.", [ToolCall("add", '{"a": 1}')])
SCHEMA = {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}}
TOOLS = [{"functionDeclarations": [{"name": "add", "parameters": SCHEMA}]}, {"googleSearch": {}}]
HELLO = {"role": "user", "parts": [{"text": "hello"}]}


async def test_whole_stream_and_history() -> None:
    backend = ScriptedBackend(lambda _t, _p: SAID)
    config = {"temperature": 0, "topP": 1, "maxOutputTokens": 500, "thinkingConfig": {}}
    system = {"parts": [{"text": "Be brief."}]}
    body = {"contents": [HELLO], "tools": TOOLS, "system_instruction": system, "generationConfig": config}
    async with live(backend) as server, httpx.AsyncClient(headers=KEY) as client:
        base = f"{server.url}/v1beta/models/any/name"
        whole = (await client.post(f"{base}:generateContent", json=body)).json()
        streamed = await client.post(f"{base}:streamGenerateContent?alt=sse", json=body)
        chunks = [json.loads(event.removeprefix("data: ")) for event in streamed.text.split("\n\n")[:-1]]
        content = whole["candidates"][0]["content"]
        assert content["role"] == "model"
        thought, text, called = content["parts"]
        assert thought == {"text": "sums", "thought": True}
        assert text == {"text": "Let me see."}
        assert (called["functionCall"]["name"], called["functionCall"]["args"]) == ("add", {"a": 1})
        parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
        assert "".join(p["text"] for p in parts if "text" in p and not p.get("thought")) == "Let me see."
        assert chunks[-1]["candidates"][0]["finishReason"] == whole["candidates"][0]["finishReason"] == "STOP"
        assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
        assert whole["usageMetadata"]["thoughtsTokenCount"] == len("<think>\nsums\n</think>")
        result = {"functionResponse": {"name": "add", "response": {"output": "3"}}}
        del called["functionCall"]["id"]  # ids are left out by some
        again = {"contents": [HELLO, content, {"role": "user", "parts": [result]}]}
        assert (await client.post(f"{base}:generateContent", json=again)).status_code == 200
        counted = (await client.post(f"{base}:countTokens", json={"contents": [HELLO]})).json()
    first, last = (FakeChatCodec().decode(backend.records["t1"][at].prompt_ids) for at in (0, -1))
    assert '"parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}' in first
    assert first.endswith("Be brief.hello")
    assert last.endswith('"function": {"name": "add", "arguments": "{\\"a\\": 1}"}}]3')
    assert '"id": "call_1"' in last
    assert counted == {"totalTokens": 8}


async def test_errors_in_its_own_shape() -> None:
    backend = ScriptedBackend(lambda _t, _p: "hi", max_context=20)
    async with live(backend) as server, httpx.AsyncClient(headers=KEY) as client:
        url = f"{server.url}/v1beta/models/m:generateContent"
        long = await client.post(url, json={"contents": [{"parts": [{"text": "y" * 40}]}]})
        bad = await client.post(url, json={"contents": [{"parts": [{"inlineData": {}}]}]})
        backend.raising = Overloaded(1.5)
        busy = await client.post(url, json={"contents": [HELLO]})
        nowhere = await client.get(f"{server.url}/v1beta/nowhere")
    assert (long.status_code, long.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert "input token count (43) exceeds the maximum" in long.json()["error"]["message"]
    assert "contents[0].parts[0]" in bad.json()["error"]["message"]
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "2")
    assert busy.json()["error"]["details"][0]["retryDelay"] == "1.500s"
    assert nowhere.json()["error"]["status"] == "NOT_FOUND"


@pytest.mark.parametrize("mode", ["AUTO", "NONE"])
async def test_calls_only_where_allowed(mode: str) -> None:
    backend = ScriptedBackend(lambda _t, _p: SAID)
    body = {"contents": [HELLO], "tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": mode}}}
    async with live(backend) as server, httpx.AsyncClient(headers=KEY) as client:
        reply = await client.post(f"{server.url}/v1beta/models/m:generateContent", json=body)
        models = (await client.get(f"{server.url}/v1beta/models")).json()
    parts = reply.json()["candidates"][0]["content"]["parts"]
    assert any("functionCall" in part for part in parts) == (mode == "AUTO")
    assert models["models"][0]["name"] == "models/scripted"
