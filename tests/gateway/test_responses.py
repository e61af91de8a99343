"""The Responses API with the stock openai client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from gateway_support import ScriptedBackend, live

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.tool_format import ToolCall, render

TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CALLING = "<think>\nsums\n</think>\n\n" + render(
    "Let me see 😀.", [ToolCall("add", '{"a": 1}'), ToolCall("add", '{"b":"é"}')]
)


def prompt_of(backend: ScriptedBackend, index: int = -1, trajectory: str = "t1") -> str:
    return FakeChatCodec().decode(backend.records[trajectory][index].prompt_ids)


async def test_whole_reply() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    async with live(backend) as server, server.client() as client:
        reply = await client.responses.create(
            model="m", input="hello", instructions="Be brief.", tools=TOOLS, metadata={"k": "v"}
        )
    thought, message, *calls = reply.output
    assert (thought.type, thought.content[0].text) == ("reasoning", "sums")
    assert (message.type, reply.output_text) == ("message", "Let me see 😀.")
    assert [(c.type, c.name, c.arguments) for c in calls] == [
        ("function_call", "add", '{"a": 1}'), ("function_call", "add", '{"b":"é"}')]  # fmt: skip
    assert len({c.call_id for c in calls} | {c.id for c in reply.output}) == 6
    assert (reply.status, reply.model, reply.metadata) == ("completed", "m", {"k": "v"})
    (record,) = backend.records["t1"]
    assert reply.usage.input_tokens == len(record.prompt_ids)
    assert reply.usage.output_tokens == len(record.sampled_ids)
    assert reply.usage.output_tokens_details.reasoning_tokens == len("<think>\nsums\n</think>")
    assert prompt_of(backend).endswith("Be brief.hello")


async def test_stream_tells_the_same() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    async with live(backend) as server, server.client() as client:
        async with client.responses.stream(model="m", input="hello", tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="m", input="hello", tools=TOOLS)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Let me see 😀."
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "sums"
    arguments = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert arguments == ['{"a": 1}', '{"b":"é"}']
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert final.usage == whole.usage
    assert shapes(final.output) == shapes(whole.output)


def shapes(items: list[object]) -> list[object]:
    """Items without their ids."""
    named = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in items]
    for item in named:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    return named


async def test_items_come_back_as_they_went() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    async with live(backend) as server, server.client() as client:
        first = await client.responses.create(model="m", input="hello", tools=TOOLS, store=False)
        echoed = [item.model_dump(exclude_none=True) for item in first.output]
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": c, "output": "3"} for c in calls]
        history = [{"role": "user", "content": "hello"}, *echoed, *results]
        await client.responses.create(model="m", input=history, tools=TOOLS, store=False)
        # One client echoes sealed reasoning alone.
        echoed[0].pop("content")
        await client.responses.create(model="m", input=[history[0], *echoed, *results], tools=TOOLS, store=False)
        echoed[0]["encrypted_content"] = "forge:!"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="m", input=[history[0], *echoed])
        assert (caught.value.code, caught.value.param) == ("invalid_encrypted_content", "input[1].encrypted_content")
        assert server.gateway.tree("t1").echoes == {"exact": 2}
    text = prompt_of(backend)
    assert text == prompt_of(backend, 1)
    assert text.endswith(f"hello{CALLING}33")


async def test_previous_response_id_goes_on_and_references_are_found() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    async with live(backend) as server, server.client() as client:
        first = await client.responses.create(model="m", input="hello", instructions="Old.", tools=TOOLS)
        second = await client.responses.create(
            model="m", input="more", previous_response_id=first.id, instructions="New."
        )
        assert second.previous_response_id == first.id
        assert prompt_of(backend).startswith("New.hello<think>sums</think>Let me see")
        assert prompt_of(backend).endswith("more")
        refers = [{"type": "item_reference", "id": item.id} for item in first.output]
        await client.responses.create(model="m", input=[{"role": "user", "content": "hello"}, *refers])
        assert prompt_of(backend).startswith("hello<think>sums</think>Let me see")
        for other, asked in ((client, "resp_none"), (server.client("t2"), first.id)):
            with pytest.raises(openai.BadRequestError) as caught:
                await other.responses.create(model="m", input="x", previous_response_id=asked)
            assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        await other.close()
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_none"}])
        kept = await client.responses.create(model="m", input="x", store=False)
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="m", input="y", previous_response_id=kept.id)


async def test_namespaces_and_free_form_tools() -> None:
    tools = [
        {"type": "namespace", "name": "mcp__calc", "description": "d", "tools": [
            {"type": "function", "name": "add", "description": "sums", "parameters": {"type": "object"}}]},
        {"type": "custom", "name": "patch", "description": "edits"},
        {"type": "web_search", "external_web_access": True},
    ]  # fmt: skip
    said = render(
        "", [ToolCall("mcp__calc__add", "{}"), ToolCall("patch", '{"input": "*** Begin"}'), ToolCall("odd", "{}")]
    )
    backend = ScriptedBackend(lambda _t, _p: said)
    body = {"model": "m", "input": "hi", "tools": tools, "stream": True}
    async with live(backend) as server, httpx.AsyncClient() as client:
        url = f"{server.url}/t/t1/v1/responses"
        events = sse((await client.post(url, json=body)).text)
        whole = (await client.post(url, json=body | {"stream": False})).json()
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        for add, patch, odd in (done, whole["output"]):
            assert (add["type"], add["namespace"], add["name"]) == ("function_call", "mcp__calc", "add")
            assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** Begin")
            assert (odd["type"], odd["name"], "namespace" in odd) == ("function_call", "odd", False)
        assert "response.custom_tool_call_input.done" in [event["type"] for event in events]
        outputs = [
            {
                "type": "function_call_output",
                "call_id": done[0]["call_id"],
                "output": [{"type": "input_text", "text": "3"}],
            },
            {"type": "custom_tool_call_output", "call_id": done[1]["call_id"], "output": "ok"},
        ]
        again = body | {"input": [{"role": "user", "content": "hi"}, *done, *outputs]}
        assert (await client.post(url, json=again)).status_code == 200
    text = prompt_of(backend)
    assert "web_search" not in text
    assert '"name": "mcp__calc__add"' in text
    assert text.endswith("3ok")


def sse(text: str) -> list[dict[str, object]]:
    """Data of every event, whose name must be its type."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_length_is_incomplete() -> None:
    async with live(ScriptedBackend(lambda _t, _p: "a long answer")) as server, server.client() as client:
        whole = await client.responses.create(model="m", input="x", max_output_tokens=4)
        stream = await client.responses.create(model="m", input="x", max_output_tokens=4, stream=True)
        last = [event async for event in stream][-1]
    assert last.type == "response.incomplete"
    for reply in (whole, last.response):
        assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert reply.output_text == "a lo"
        assert reply.output[0].status == "incomplete"


async def test_turns_of_others_stay_apart() -> None:
    backend = ScriptedBackend(lambda _t, _p: "")
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
        {"role": "assistant", "content": "after"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
    ]
    async with live(backend) as server, server.client() as client:
        reply = await client.responses.create(model="m", input=items)
    assert reply.output_text == ""
    assert reply.output[0].type == "message"  # silence is an empty message, not nothing
    ids = backend.records["t1"][0].prompt_ids
    assert ids.count(256) == 4  # the developer, "one", "two" with its call and what came after it, the result
    assert "A\nBonetwoafter[{" in prompt_of(backend)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"), ({"input": []}, "input"), ({"input": 1}, "input"), ({"input": [{"type": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": 1}]}, "input[0].call_id"),
        ({"input": "x", "conversation": "c"}, "conversation"), ({"input": "x", "background": True}, "background"),
        ({"input": "x", "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)  # fmt: skip
async def test_bad_requests_name_the_field(body: dict[str, object], param: str) -> None:
    async with live(ScriptedBackend(lambda _t, _p: "")) as server, httpx.AsyncClient() as client:
        reply = await client.post(f"{server.url}/t/t1/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_the_prompt_can_be_counted() -> None:
    async with live(ScriptedBackend(lambda _t, _p: "")) as server, server.client() as client:
        counted = await client.responses.input_tokens.count(model="m", input="hello")
    assert counted.input_tokens == 1 + 5 + 1 + 1
