"""Fields of Chat Completions beyond a plain question, and what is said where one cannot be kept."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from gateway_support import ScriptedBackend, live, until

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.request import Constraint, Request
from forge.gateway.tool_format import ToolCall, render

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "sub")]
TWO = render("Both.", [ToolCall("add", "{}"), ToolCall("sub", "{}")])
SCHEMA = {"type": "object", "required": ["a"]}


async def test_several_choices() -> None:
    backend = ScriptedBackend(lambda _t, _p: TWO)
    asked = {"model": "m", "messages": HELLO, "tools": TOOLS, "n": 3, "seed": 5, "logprobs": True}
    async with live(backend) as server, server.client() as client:
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    calls = [call.id for choice in whole.choices for call in choice.message.tool_calls]
    assert len(set(calls)) == 6
    n = len(TWO) + 1
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        len(backend.records["t1"][0].prompt_ids),
        3 * n,
    )
    assert chunks[-1].usage == whole.usage
    texts, ends, tokens = ["", "", ""], [], [0, 0, 0]
    for choice in (chunk.choices[0] for chunk in chunks[:-1]):
        texts[choice.index] += choice.delta.content or ""
        tokens[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
        ends += [choice.finish_reason] if choice.finish_reason else []
    assert texts == ["Both."] * 3
    assert ends == ["tool_calls"] * 3
    assert tokens == [n] * 3
    assert [sampling.seed for sampling in backend.samplings] == [5, 6, 7] * 2
    assert [record.index for record in backend.records["t1"]] == list(range(6))


async def test_choices_fail_together() -> None:
    backend = ScriptedBackend(lambda _t, _p: TWO)
    body = {"messages": HELLO, "n": 3}
    async with live(backend) as server, httpx.AsyncClient() as client:
        for stream in (False, True):
            backend.failures.append(RuntimeError("one of three"))
            reply = await client.post(f"{server.url}/t/t1/v1/chat/completions", json=body | {"stream": stream})
            # A stream may have begun with what the others said: then it must say so itself.
            assert reply.status_code == (200 if stream else 500)
            assert "[DONE]" not in reply.text
            assert "server had an error" in reply.text
        await until(lambda: len(backend.cancelled) >= 2)
    assert not backend.records


async def test_one_call_at_a_time_is_kept() -> None:
    backend = ScriptedBackend(lambda _t, _p: TWO)
    backend.chunk = 1000
    async with live(backend) as server, server.client() as client, server.anthropic() as other:
        asked = {"model": "m", "messages": HELLO, "tools": TOOLS}
        whole = await client.chat.completions.create(**asked, parallel_tool_calls=False)
        both = await client.chat.completions.create(**asked, parallel_tool_calls=True)
        message = await other.messages.create(
            model="m", max_tokens=500, messages=HELLO, tools=[{"name": "add", "input_schema": {"type": "object"}}],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )  # fmt: skip
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["add"]
    assert whole.choices[0].finish_reason == "tool_calls"
    assert len(both.choices[0].message.tool_calls) == 2
    assert [block.type for block in message.content] == ["text", "tool_use"]
    one = FakeChatCodec().decode(backend.records["t1"][0].sampled_ids)
    assert one == TWO[: TWO.index("</tool_call>") + len("</tool_call>")]


async def test_reasoning_goes_out_and_comes_back() -> None:
    said = "<think>\nhm\n</think>\n\n" + TWO
    backend = ScriptedBackend(lambda _t, _p: said)
    async with live(backend) as server, server.client() as client:
        whole = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        stream = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        message = whole.choices[0].message
        assert message.model_extra["reasoning_content"] == "hm"
        assert message.content == "Both."
        assert "".join(d.model_extra.get("reasoning_content") or "" for d in deltas) == "hm"
        assert "".join(d.content or "" for d in deltas) == "Both."
        assert whole.usage.completion_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>")
        echoed = message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="m", messages=[*HELLO, echoed])
        echoed["reasoning"] = echoed.pop("reasoning_content")  # its other name
        await client.chat.completions.create(model="m", messages=[*HELLO, echoed])
    prompts = [FakeChatCodec().decode(record.prompt_ids) for record in backend.records["t1"][2:]]
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("hello<think>hm</think>Both.[")


FORCED: list[tuple[dict[str, object], Constraint]] = [
    ({"tools": TOOLS, "tool_choice": "required"}, Constraint(field="tool_choice", calls=True)),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
     Constraint(field="tool_choice", calls=True, tools=("sub",))),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "add"}}]}}},
     Constraint(field="tool_choice", calls=True, tools=("add",))),
    ({"response_format": {"type": "json_object"}}, Constraint(field="response_format")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
     Constraint(field="response_format", schema=SCHEMA)),
]  # fmt: skip


@pytest.mark.parametrize(("options", "constraint"), FORCED)
async def test_what_is_forced_reaches_the_seam_or_is_said_not_to_be_kept(
    options: dict[str, object], constraint: Constraint
) -> None:
    seen: list[Constraint] = []

    def constrain(asked: Constraint, request: Request, prompt_ids: tuple[int, ...]) -> str:
        assert (request.messages, prompt_ids) == (HELLO, FakeChatCodec().prompt(HELLO, request.tools))
        seen.append(asked)
        return "a grammar"

    for able in (None, constrain):
        backend = ScriptedBackend(lambda _t, _p: TWO)
        async with live(backend, constrain=able) as server, httpx.AsyncClient() as client:
            for stream in (False, True):
                body = {"messages": HELLO, "stream": stream} | options
                reply = await client.post(f"{server.url}/t/t1/v1/chat/completions", json=body)
                assert reply.status_code == 200
                assert reply.headers.get("x-forge-unenforced") == (None if able else constraint.field)
                assert backend.samplings[-1].grammar == ("a grammar" if able else None)
                assert backend.records["t1"][-1].constrained == (able is not None)
    assert seen == [constraint, constraint]


async def test_every_protocol_says_what_it_overlooks() -> None:
    tools = [{"name": "add", "input_schema": {"type": "object"}}]
    functions = [{"functionDeclarations": [{"name": "add"}]}]
    asks = {
        "/v1/chat/completions": ({"messages": HELLO, "logit_bias": {"1": 2}, "presence_penalty": 0}, "logit_bias"),
        "/v1/completions": ({"prompt": "x", "frequency_penalty": 1}, "frequency_penalty"),
        "/v1/messages": ({"messages": HELLO, "top_k": 5, "tools": tools, "tool_choice": {"type": "any"}},
                         "top_k, tool_choice"),
        "/v1/responses": ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
        "/v1beta/models/m:generateContent": (
            {"contents": [{"parts": [{"text": "x"}]}], "tools": functions,
             "toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "toolConfig.functionCallingConfig"),
    }  # fmt: skip
    async with live(ScriptedBackend(lambda _t, _p: "")) as server, httpx.AsyncClient() as client:
        for path, (body, said) in asks.items():
            reply = await client.post(f"{server.url}/t/t1{path}", json=body)
            assert (reply.status_code, reply.headers.get("x-forge-unenforced")) == (200, said), path


async def test_a_silent_stream_is_kept_alive_by_events() -> None:
    """From its head on, and the head does not wait for the first token for ever."""
    asks = {
        "/v1/chat/completions": {"messages": HELLO, "stream": True},
        "/v1/completions": {"prompt": "x", "stream": True},
        "/v1/responses": {"input": "x", "stream": True},
        "/v1/messages": {"messages": HELLO, "stream": True},
        "/v1beta/models/m:streamGenerateContent": {"contents": [{"parts": [{"text": "x"}]}]},
    }
    for before in (0, 2):
        backend = ScriptedBackend(lambda _t, _p: "answer")
        backend.gate.clear()
        backend.gate_after = before
        heard = dict.fromkeys(asks, "")
        async with live(backend, keep_alive_s=0.05) as server, httpx.AsyncClient() as client:

            async def listen(path: str, at: str = server.url, by: httpx.AsyncClient = client) -> None:
                async with by.stream("POST", f"{at}/t/t1{path}", json=asks[path]) as reply:
                    async for text in reply.aiter_text():
                        heard[path] += text  # noqa: B023

            listening = [asyncio.create_task(listen(path)) for path in asks]
            await until(lambda: all(text.count("\n\n") >= 9 for text in heard.values()), 20)  # noqa: B023
            backend.gate.set()
            await asyncio.gather(*listening)
        events = {path: [parsed(event) for event in text.split("\n\n")[:-1]] for path, text in heard.items()}
        chat, legacy, responses, messages, gemini = events.values()
        assert sum(e["choices"][0]["delta"] == {"content": ""} for e in chat[1:-1]) >= 3
        assert sum(e["choices"][0]["text"] == "" for e in legacy[:-2]) >= 3
        assert sum(e["type"] == "response.in_progress" for e in responses) >= 4
        assert sum(e["type"] == "ping" for e in messages) >= 4
        assert sum(e["candidates"][0]["content"]["parts"] == [{"text": ""}] for e in gemini) >= 3
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in chat[:-1]) == "answer"
        assert "".join(e["delta"] for e in responses if e["type"] == "response.output_text.delta") == "answer"


def parsed(event: str) -> dict[str, object]:
    data = event.split("data: ", 1)[1]
    return {"type": "done"} if data == "[DONE]" else json.loads(data)
