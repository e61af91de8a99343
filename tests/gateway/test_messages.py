"""Anthropic's Messages API with the stock anthropic client, and as Claude Code speaks it."""

from __future__ import annotations

import json

import anthropic
import httpx
import pytest
from gateway_support import ScriptedBackend, live

from forge.gateway.fake_chat import END, FakeChatCodec
from forge.gateway.tool_format import ToolCall, render

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"name": "add", "description": "sums", "input_schema": {"type": "object"}}]
CALLING = "<think>\nsums\n</think>\n\n" + render(
    "Let me see 😀.", [ToolCall("add", '{"a": 1}'), ToolCall("add", '{"b":"é"}')]
)


def prompt_of(backend: ScriptedBackend, index: int = -1) -> str:
    return FakeChatCodec().decode(backend.records["t1"][index].prompt_ids)


async def test_whole_and_stream_tell_the_same() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    asked = {"model": "m", "max_tokens": 500, "messages": HELLO, "tools": TOOLS, "system": "Be brief."}
    async with live(backend) as server, server.anthropic() as client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            events = [event.type async for event in stream]
            final = await stream.get_final_message()
    for message in (whole, final):
        thought, text, *uses = message.content
        assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "sums", True)
        assert (text.type, text.text) == ("text", "Let me see 😀.")
        assert [(use.name, use.input) for use in uses] == [("add", {"a": 1}), ("add", {"b": "é"})]
        assert (message.stop_reason, message.model, message.role) == ("tool_use", "m", "assistant")
        assert message.usage.output_tokens == len(CALLING.encode()) + 1
        assert message.usage.input_tokens == len(backend.records["t1"][0].prompt_ids)
    ids = {use.id for message in (whole, final) for use in message.content if use.type == "tool_use"}
    assert len(ids) == 4
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 4
    assert "Be brief.hello" in prompt_of(backend)
    assert '"parameters": {"type": "object"}' in prompt_of(backend)


async def test_a_note_to_the_vendor_is_not_shown_to_the_model() -> None:
    """claude-code's, another in every conversation: the rest of the system prompt stays the same prefix."""
    backend = ScriptedBackend(lambda _t, _p: "ok")
    note = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.ae1; cc_entrypoint=sdk-cli;"}
    async with live(backend) as server, server.anthropic() as client:
        for system in ([note, {"type": "text", "text": "Be brief."}], "Be brief."):
            await client.messages.create(model="m", max_tokens=9, messages=HELLO, system=system)
    assert prompt_of(backend, 0) == prompt_of(backend, 1)


async def test_blocks_come_back_as_they_went() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    async with live(backend) as server, server.anthropic() as client:
        first = await client.messages.create(model="m", max_tokens=500, messages=HELLO, tools=TOOLS)
        one, two = (block.id for block in first.content if block.type == "tool_use")
        results = [
            {"type": "tool_result", "tool_use_id": one, "content": "3", "cache_control": {"type": "ephemeral"}},
            {"type": "tool_result", "tool_use_id": two, "content": [{"type": "text", "text": "4"}], "is_error": True},
            {"type": "text", "text": "Go on."},
        ]
        messages = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": results},
            {"role": "system", "content": "A reminder."},
        ]
        await client.messages.create(model="m", max_tokens=500, messages=messages, tools=TOOLS)
        assert server.gateway.tree("t1").echoes == {"arguments_rewritten": 1}  # a protocol of objects keeps no spaces
    assert prompt_of(backend).endswith(f"hello{CALLING}34Go on.A reminder.")
    assert backend.records["t1"][1].prompt_ids.count(END) == 1 + 6


async def test_as_claude_code_asks() -> None:
    """HEAD of the base, beta in the query, hosted and versioned tools, markers, metadata; then without a stream."""
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "claude-x", "max_tokens": 32000, "stream": True, "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []}, "output_config": {"effort": "high"},
        "system": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"} | mark],
        "tools": [*TOOLS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | mark]}],
    }  # fmt: skip
    headers = {"authorization": "Bearer key", "anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
    async with live(backend) as server, httpx.AsyncClient(headers=headers) as client:
        assert (await client.head(f"{server.url}/t/t1")).status_code == 200
        url = f"{server.url}/t/t1/v1/messages?beta=true"
        streamed = await client.post(url, json=body)
        whole = await client.post(url, json={k: v for k, v in body.items() if k != "stream"})
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in streamed.text.split("\n\n")[:-1]]
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)
    names = [event["event"] for event in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert [block["type"] for block in whole.json()["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert "web_search" not in prompt_of(backend)
    assert "A\nBhi" in prompt_of(backend)


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped(stream: bool) -> None:
    async with live(ScriptedBackend(lambda _t, _p: "one STOP two")) as server, server.anthropic() as client:

        async def ask(**options: object) -> tuple[str | None, str | None, str]:
            asked = {"model": "m", "messages": HELLO, "max_tokens": 100} | options
            if stream:
                async with client.messages.stream(**asked) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**asked)
            return message.stop_reason, message.stop_sequence, message.content[0].text

        assert await ask() == ("end_turn", None, "one STOP two")
        assert await ask(max_tokens=3) == ("max_tokens", None, "one")
        assert await ask(stop_sequences=["zz", "STOP"]) == ("stop_sequence", "STOP", "one ")


async def test_count_tokens_and_models() -> None:
    backend = ScriptedBackend(lambda _t, _p: "")
    async with live(backend) as server, server.anthropic() as client:
        counted = await client.messages.count_tokens(model="m", messages=HELLO)
        models = await client.models.list()
        model = await client.models.retrieve("scripted")
        with pytest.raises(anthropic.NotFoundError, match="answers to any name"):
            await client.models.retrieve("other")
    assert counted.input_tokens == 1 + 5 + 1 + 1
    assert [m.id for m in models.data] == [model.id] == ["scripted"]
    assert not backend.records


async def test_errors_in_its_own_shape() -> None:
    backend = ScriptedBackend(lambda _t, _p: "hi", max_context=20, known={"t1"})
    async with live(backend) as server, server.anthropic() as client:
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 42 tokens > 20 maximum") as caught:
            await client.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "y" * 39}])
        assert caught.value.body["error"]["type"] == "invalid_request_error"
        async with server.anthropic("nobody") as stranger:
            with pytest.raises(anthropic.NotFoundError):
                await stranger.messages.create(model="m", max_tokens=9, messages=HELLO)
        async with httpx.AsyncClient() as plain:
            reply = await plain.get(f"{server.url}/t/t1/v1/messages")
    assert (reply.status_code, reply.json()["type"]) == (405, "error")


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "messages"), ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": 1}]}]},
         "messages[0].content[0].input"),
        ({"messages": HELLO, "tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"messages": HELLO, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"messages": HELLO, "tool_choice": {"type": "tool", "name": "sub"}, "tools": TOOLS}, "tool_choice"),
        ({"messages": HELLO, "temperature": 1.5}, "temperature"),
    ],
)  # fmt: skip
async def test_bad_requests_name_the_field(body: dict[str, object], named: str) -> None:
    async with live(ScriptedBackend(lambda _t, _p: "")) as server, httpx.AsyncClient() as client:
        reply = await client.post(f"{server.url}/t/t1/v1/messages", json=body)
    error = reply.json()
    assert (reply.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in error["error"]["message"]
