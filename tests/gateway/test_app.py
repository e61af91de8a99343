"""The gateway over loopback with the stock openai clients."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from gateway_support import Live, ScriptedBackend, live, until
from openai import AsyncOpenAI, OpenAI

from forge.gateway.app import create_app
from forge.gateway.backend import Overloaded
from forge.gateway.fake_chat import END, FakeChatCodec
from forge.gateway.server import serve
from forge.gateway.tool_format import ToolCall, render
from forge.rollout.engine import EngineError
from forge.types import ForgeError

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLING = render("Let me see 😀.", [ToolCall("add", '{"a": 1}'), ToolCall("add", '{"b":"é"}')])
PLAIN = "Grüße, 😀!"


def plain() -> ScriptedBackend:
    return ScriptedBackend(lambda _t, _p: PLAIN)


async def test_whole_reply_usage_and_record() -> None:
    backend = plain()
    async with live(backend) as server, server.client() as client:
        reply = await client.chat.completions.create(
            model="m", messages=HELLO, seed=-5, temperature=0.5, top_p=0.0, logprobs=True
        )
    n = len(PLAIN.encode()) + 1
    assert reply.choices[0].message.content == PLAIN
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model == "m"
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (8, n)
    content = reply.choices[0].logprobs.content
    assert len(content) == n
    assert content[0].token == "G"
    assert content[0].bytes == [71]
    assert content[0].logprob == -0.5
    (record,) = backend.records["t1"]
    assert record.prompt_ids == FakeChatCodec().prompt(HELLO, [])
    assert record.sampled_ids == (*PLAIN.encode(), END)
    assert record.logprobs == (-0.5,) * n
    assert record.versions == (3,) * n
    assert (record.finish, record.temperature, record.instance, record.index) == ("stop", 0.5, 7, 0)
    assert record.received_s < record.first_token_s < record.finished_s
    sampling = backend.samplings[0]
    assert sampling.seed is not None
    assert sampling.seed >= 0
    assert 0 < sampling.top_p < 1e-3


async def test_stream_equals_whole() -> None:
    backend = ScriptedBackend(lambda _t, _p: CALLING)
    async with live(backend) as server, server.client() as client:
        whole = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        stream = await client.chat.completions.create(
            model="m", messages=HELLO, tools=TOOLS, stream=True, logprobs=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "tool_calls"
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    content = "".join(choice.delta.content or "" for choice in choices)
    assert content == whole.choices[0].message.content == "Let me see 😀."
    assert len([choice for choice in choices if choice.delta.content]) > 5
    calls: dict[int, list[str]] = {}
    for call in (call for choice in choices for call in choice.delta.tool_calls or []):
        known = calls.setdefault(call.index, [call.id or "", "", ""])
        known[1] += call.function.name or ""
        known[2] += call.function.arguments or ""
    want = [(call.function.name, call.function.arguments) for call in whole.choices[0].message.tool_calls]
    assert [(name, arguments) for _, name, arguments in calls.values()] == want
    assert want == [("add", '{"a": 1}'), ("add", '{"b":"é"}')]
    ids = {call_id for call_id, _, _ in calls.values()} | {c.id for c in whole.choices[0].message.tool_calls}
    assert len(ids) == 4
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert len(tokens) == whole.usage.completion_tokens
    assert [r.index for r in backend.records["t1"]] == [0, 1]


async def test_tool_loop() -> None:
    def reply(_trajectory: str, prompt: str) -> str:
        return "It is 3." if "<tool_call>" in prompt and prompt.endswith("3") else CALLING

    async with live(ScriptedBackend(reply)) as server, server.client() as client:
        first = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
        message = first.choices[0].message
        results = [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in message.tool_calls]
        messages = [*HELLO, message.model_dump(exclude_none=True), *results]
        last = await client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        assert last.choices[0].message.content == "It is 3."
        muted = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS, tool_choice="none")
        assert muted.choices[0].message.tool_calls is None
        assert muted.choices[0].message.content == CALLING
        assert muted.choices[0].finish_reason == "stop"


async def test_malformed_call_is_content_and_flagged() -> None:
    text = "<tool_call>{oops}</tool_call>"
    async with live(ScriptedBackend(lambda _t, _p: text)) as server, server.client() as client:
        reply = await client.chat.completions.create(model="m", messages=HELLO, tools=TOOLS)
    assert reply.choices[0].message.content == text
    assert reply.model_extra["forge"] == {"malformed_tool_calls": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_limits_and_stop_strings(stream: bool) -> None:
    backend = ScriptedBackend(lambda _t, _p: "one two STOP three", max_context=30)
    backend.chunk = 4
    async with live(backend) as server, server.client() as client:

        async def ask(**options: object) -> tuple[str, str]:
            reply = await client.chat.completions.create(model="m", messages=HELLO, stream=stream, **options)
            if not stream:
                return reply.choices[0].message.content, reply.choices[0].finish_reason
            chunks = [chunk.choices[0] async for chunk in reply]
            return "".join(c.delta.content or "" for c in chunks), chunks[-1].finish_reason

        assert await ask(stop=["STOP", "zzz"]) == ("one two ", "stop")
        assert await ask(stop="wo") == ("one t", "stop")
        assert await ask(max_tokens=3) == ("one", "length")
        assert await ask(max_completion_tokens=5, max_tokens=3) == ("one t", "length")
        assert await ask() == ("one two STOP three", "stop")
    records = backend.records["t1"]
    # Cut at the very token that completed the stop string, though the engine gave four at once.
    assert bytes(records[0].sampled_ids) == b"one two STOP"
    assert records[0].finish == "stop"
    assert bytes(records[1].sampled_ids) == b"one two"
    assert records[2].finish == "length"
    assert len(records[2].logprobs) == 3
    assert backend.cancelled == ["t1", "t1"]
    assert backend.samplings[-1].max_tokens == 30 - 8


async def test_pinned_sampling() -> None:
    backend = plain()
    async with live(backend, pin_sampling=True) as server, server.client() as client:
        await client.chat.completions.create(
            model="m", messages=HELLO, temperature=0, top_p=0.5, seed=1, max_tokens=9000
        )
        await client.chat.completions.create(model="m", messages=HELLO, max_tokens=4)
    first, second = backend.samplings
    assert (first.temperature, first.top_p, first.seed, first.max_tokens) == (1.0, 1.0, None, 4096)
    assert second.max_tokens == 4


async def test_unusual_but_valid_bodies() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "hi", "name": "bob"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "user", "content": ""},
    ]  # fmt: skip
    body = {"messages": messages, "store": True, "whatever": [1], "stop": None, "temperature": 1, "n": 1,
            "tool_choice": "auto", "response_format": {"type": "text"}, "stream": None}  # fmt: skip
    backend = plain()
    async with live(backend) as server, httpx.AsyncClient() as client:
        for headers in ({"Authorization": "Bearer k1"}, {"x-api-key": "k1"}, {"x-goog-api-key": "k1"},
                        {"X-Forge-Trajectory": "k1", "Authorization": "Bearer zz"}):  # fmt: skip
            reply = await client.post(f"{server.url}/v1/chat/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
        models = await client.get(f"{server.url}/t/x/v1/models")
    assert models.json()["data"][0]["id"] == "scripted"
    assert len(backend.records["k1"]) == 4
    assert FakeChatCodec().decode(backend.records["k1"][0].prompt_ids).startswith("a\nbhi")


USER = {"role": "user", "content": "x"}
BAD_BODIES: list[tuple[object, str | None]] = [
    (b"", None), (b"{", None), (b"[]", None), (b"\xff\xfe", None), (b"[" * 200_000, None), (b'{"messages":', None),
    ({}, "messages"), ({"messages": []}, "messages"), ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"), ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    ({"messages": [{"role": ["user"], "content": ""}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [USER | {"name": 3}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [USER], "n": 0}, "n"), ({"messages": [USER], "n": "1"}, "n"), ({"messages": [USER], "n": 999}, "n"),
    ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    ({"messages": [USER], "tool_choice": "maybe", "tools": TOOLS}, "tool_choice"),
    ({"messages": [USER], "tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": TOOLS},
     "tool_choice"),
    ({"messages": [USER], "tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice"),
    ({"messages": [USER], "tools": {}}, "tools"), ({"messages": [USER], "tools": [{"type": "x"}]}, "tools[0]"),
    ({"messages": [USER], "temperature": "hot"}, "temperature"),
    ({"messages": [USER], "temperature": 9}, "temperature"),
    ({"messages": [USER], "top_p": True}, "top_p"), ({"messages": [USER], "top_p": -1}, "top_p"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens"), ({"messages": [USER], "max_tokens": 1.5}, "max_tokens"),
    ({"messages": [USER], "stream": "yes"}, "stream"), ({"messages": [USER], "stop": [1]}, "stop"),
    ({"messages": [USER], "stop": 1}, "stop"), ({"messages": [USER], "seed": "a"}, "seed"),
    ({"messages": [USER], "stream_options": 1}, "stream_options"), ({"messages": [USER], "model": 1}, "model"),
    ({"messages": [USER], "logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    ({"messages": [USER], "response_format": {"type": "yaml"}}, "response_format"),
    ({"messages": [USER], "response_format": {"type": "json_schema"}}, "response_format"),
]  # fmt: skip


async def test_bad_requests_name_the_field() -> None:
    backend = plain()
    async with live(backend) as server, httpx.AsyncClient() as client:
        for body, param in BAD_BODIES:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            reply = await client.post(f"{server.url}/t/a/v1/chat/completions", content=content)
            error = reply.json()["error"]
            assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), body
            assert "Traceback" not in reply.text
            assert error["message"]
    assert not backend.records


async def test_other_errors() -> None:
    backend = ScriptedBackend(lambda _t, _p: "hi", max_context=20, known={"known"})
    async with live(backend, max_body_bytes=10_000) as server, server.client("known") as client:

        async def fails(kind: type[openai.APIStatusError], asked: AsyncOpenAI = client, text: str = "x") -> object:
            with pytest.raises(kind) as caught:
                await asked.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            return caught.value

        error = await fails(openai.BadRequestError, text="y" * 40)
        assert error.code == "context_length_exceeded"
        assert "maximum context length is 20" in error.message
        async with server.client("nobody") as stranger:
            assert (await fails(openai.NotFoundError, stranger)).code == "trajectory_not_found"
        error = await fails(openai.APIStatusError, text="y" * 4_000_000)
        assert error.status_code == 413
        backend.raising = EngineError("token id 999 is not below 300")
        assert "999" in (await fails(openai.BadRequestError)).message
        backend.raising = Overloaded(1.2)
        error = await fails(openai.RateLimitError)
        assert (error.response.headers["retry-after"], error.response.headers["retry-after-ms"]) == ("2", "1200")
        backend.raising = RuntimeError("secret detail")
        error = await fails(openai.InternalServerError)
        assert "secret" not in error.response.text
        assert "Traceback" not in error.response.text
    assert not backend.records


async def test_no_identity_no_route() -> None:
    async with live(plain()) as server, httpx.AsyncClient() as client:
        missing = await client.post(f"{server.url}/v1/chat/completions", json={"messages": [USER]})
        assert missing.status_code == 401
        assert missing.json()["error"]["type"] == "authentication_error"
        assert (await client.get(f"{server.url}/nowhere")).json()["error"]["code"] == "unknown_url"
        wrong = await client.get(f"{server.url}/t/a/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.json()["error"]["message"]


async def test_error_inside_a_stream_is_an_event() -> None:
    backend = plain()
    backend.gate.clear()
    async with live(backend) as server, server.client() as client:
        stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
        await anext(stream)
        server.gateway.forget("t1")
        with pytest.raises(openai.APIError, match="cancelled"):
            async for _ in stream:
                pass
        await stream.close()
    assert not backend.records


async def test_stock_sync_client() -> None:
    async with live(plain()) as server:

        def talk() -> str | None:
            with OpenAI(base_url=f"{server.url}/v1", api_key="sync-traj", max_retries=0) as client:
                return client.chat.completions.create(model="m", messages=HELLO).choices[0].message.content

        assert await asyncio.to_thread(talk) == PLAIN


async def test_port_in_use_and_clean_stop() -> None:
    async with live(plain()) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(ForgeError, match=f"port {port} .*already in use.*another port"):
            await serve(create_app(plain(), FakeChatCodec()), port=port)
    again = await serve(create_app(plain(), FakeChatCodec()), port=port)  # freed
    await again.stop()


async def test_an_app_that_cannot_start_is_an_error_and_no_exit() -> None:
    with pytest.raises(ForgeError, match="failed to start"):
        await serve(lambda *_: None)


async def hang_up(server: Live, backend: ScriptedBackend, stream: bool, headers: dict[str, str]) -> None:
    """Ask, and close the connection once the generation is under way."""
    async with httpx.AsyncClient() as client:
        url, body = f"{server.url}/t/t1/v1/chat/completions", {"messages": [USER], "stream": stream}
        asking = asyncio.create_task(client.post(url, json=body, headers=headers))
        started = len(backend.samplings)
        await until(lambda: len(backend.samplings) > started)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_cancels_and_leaves_no_record(stream: bool) -> None:
    backend = plain()
    backend.gate.clear()
    async with live(backend) as server:
        await hang_up(server, backend, stream, {})
        await until(lambda: backend.cancelled)
        backend.gate.set()
        await asyncio.sleep(0.02)
    assert not backend.records


async def test_an_sdk_gets_a_moment_to_come_back() -> None:
    backend = plain()
    backend.gate.clear()
    async with live(backend, retry_grace_s=0.4) as server:
        await hang_up(server, backend, False, {"x-stainless-retry-count": "0"})
        await asyncio.sleep(0.1)
        assert not backend.cancelled
        backend.gate.set()  # it completes with nobody there, and nobody comes
        await asyncio.sleep(0.6)
    assert not backend.records


@pytest.mark.parametrize("stream", [False, True])
async def test_a_timed_out_client_gets_its_first_sample(stream: bool) -> None:
    backend = plain()
    backend.gate.clear()
    async with live(backend) as server, server.client(max_retries=3, timeout=0.4) as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO, stream=stream))
        if stream:  # the head arrives, the body stalls: the SDK raises; only whole replies are retried
            reply = await asking
            with pytest.raises(openai.APITimeoutError):
                async for _ in reply:
                    pass
            await reply.close()
            backend.gate.set()
            again = await client.chat.completions.create(
                model="m", messages=HELLO, stream=True, extra_headers={"x-stainless-retry-count": "1"}
            )
            content = "".join([c.choices[0].delta.content or "" async for c in again])
        else:
            await asyncio.sleep(0.6)
            backend.gate.set()
            content = (await asking).choices[0].message.content
        assert content == PLAIN
        assert len(backend.samplings) == len(backend.records["t1"]) == 1
        # Delivered: the same body is now a new sample, marked or not.
        extra = {"x-stainless-retry-count": "1"}
        await client.chat.completions.create(model="m", messages=HELLO, stream=stream, extra_headers=extra)
    assert len(backend.samplings) == 2


async def test_identical_bodies_are_different_samples() -> None:
    backend = plain()
    async with live(backend) as server, server.client() as client:
        asks = (client.chat.completions.create(model="m", messages=HELLO) for _ in range(5))
        replies = await asyncio.gather(*asks)
    assert len({reply.id for reply in replies}) == 5
    assert sorted(r.index for r in backend.records["t1"]) == [0, 1, 2, 3, 4]
