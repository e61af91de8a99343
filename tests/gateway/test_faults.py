"""What the stock clients see and do when things go wrong, the same in every protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from gateway_support import Live, ScriptedBackend, live, until

from forge.gateway.backend import Overloaded
from forge.rollout.engine import EngineError

TEXT = "the answer"
HELLO = [{"role": "user", "content": "hello"}]


async def chat(client: Any, **options: Any) -> Any:
    reply = await client.chat.completions.create(model="m", messages=HELLO, **options)
    if not options.get("stream"):
        return reply.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])


async def completions(client: Any, **options: Any) -> Any:
    reply = await client.completions.create(model="m", prompt="hello", **options)
    if not options.get("stream"):
        return reply.choices[0].text
    return "".join([chunk.choices[0].text async for chunk in reply])


async def responses(client: Any, **options: Any) -> Any:
    reply = await client.responses.create(model="m", input="hello", **options)
    if not options.get("stream"):
        return reply.output_text
    return "".join([event.delta async for event in reply if event.type == "response.output_text.delta"])


async def messages(client: Any, **options: Any) -> Any:
    reply = await client.messages.create(model="m", max_tokens=100, messages=HELLO, **options)
    if not options.get("stream"):
        return reply.content[0].text
    return "".join([event.delta.text async for event in reply if event.type == "content_block_delta"])


Ask = Callable[..., Awaitable[Any]]
every_protocol = pytest.mark.parametrize("ask", [chat, completions, responses, messages])
streamed_or_not = pytest.mark.parametrize("stream", [False, True])


def client_of(server: Live, ask: Ask, trajectory: str = "t1", **options: object) -> Any:
    return server.anthropic(trajectory, **options) if ask is messages else server.client(trajectory, **options)


def errors_of(ask: Ask) -> Any:
    return anthropic if ask is messages else openai


@every_protocol
@streamed_or_not
async def test_an_overloaded_server_is_waited_for(ask: Ask, stream: bool) -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.failures += [Overloaded(0.05), Overloaded(0.05)]
    async with live(backend) as server, client_of(server, ask, max_retries=2) as client:
        assert await ask(client, stream=stream) == TEXT
        backend.failures += [Overloaded(1.2)] * 3
        async with client_of(server, ask) as hasty:
            with pytest.raises(errors_of(ask).RateLimitError) as caught:
                await ask(hasty, stream=stream)
    assert caught.value.response.headers["retry-after"] == "2"
    assert caught.value.response.headers["retry-after-ms"] == "1200"
    assert "try again in 1.2s" in str(caught.value)
    assert len(backend.records["t1"]) == 1


@every_protocol
@streamed_or_not
async def test_a_fault_of_ours_is_tried_again_and_tells_nothing(ask: Ask, stream: bool) -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    async with live(backend) as server, client_of(server, ask, max_retries=1) as client:
        backend.failures.append(RuntimeError("secret"))
        assert await ask(client, stream=stream) == TEXT
        backend.failures += [RuntimeError("secret")] * 2
        with pytest.raises(errors_of(ask).InternalServerError) as caught:
            await ask(client, stream=stream)
        assert "secret" not in caught.value.response.text
        backend.failures.append(EngineError("token id 999 is not below 300"))
        with pytest.raises(errors_of(ask).BadRequestError, match="999"):
            await ask(client, stream=stream)
    assert len(backend.records["t1"]) == 1


@every_protocol
async def test_a_broken_stream_does_not_look_complete(ask: Ask) -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.breaking = RuntimeError("secret")
    async with live(backend) as server, client_of(server, ask) as client:
        if ask is responses:
            stream = await client.responses.create(model="m", input="hello", stream=True)
            events = [event async for event in stream]
            assert events[-1].type == "response.failed"
            assert events[-1].response.status == "failed"
            assert events[-1].response.error.code == "server_error"
            assert "secret" not in events[-1].response.error.message
        else:
            with pytest.raises(errors_of(ask).APIError) as caught:
                await ask(client, stream=True)
            assert "server had an error" in str(caught.value)
            if ask is messages:
                assert caught.value.body["error"]["type"] == "overloaded_error"
        backend.breaking = None
        assert await ask(client) == TEXT  # the fallback without a stream is answered
    assert len(backend.records["t1"]) == 1


@every_protocol
async def test_a_client_that_times_out_gets_its_first_sample(ask: Ask) -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.gate.clear()
    async with live(backend) as server, client_of(server, ask, max_retries=4, timeout=0.4) as client:
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0.6)
        backend.gate.set()
        assert await asking == TEXT
        assert len(backend.samplings) == len(backend.records["t1"]) == 1
        # Delivered: the same body is now a new sample, marked or not.
        assert await ask(client, extra_headers={"x-stainless-retry-count": "1"}) == TEXT
    assert len(backend.samplings) == 2


@every_protocol
async def test_a_stream_that_was_lost_is_told_again_from_its_beginning(ask: Ask) -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.gate.clear()
    async with live(backend) as server, client_of(server, ask, timeout=0.3) as client:
        # One of the SDKs lets its HTTP client's own error through where a stream stalls.
        with pytest.raises((errors_of(ask).APITimeoutError, httpx2.TimeoutException)):
            await ask(client, stream=True)
        backend.gate.set()
        assert await ask(client, stream=True, extra_headers={"x-stainless-retry-count": "1"}) == TEXT
    assert len(backend.samplings) == len(backend.records["t1"]) == 1


@every_protocol
async def test_a_cut_stream_leaves_nothing_and_the_next_ask_is_new(ask: Ask) -> None:
    """As Claude Code does: the connection breaks, and the same is asked again, unmarked and without a stream."""
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.gate.clear()
    async with live(backend, retry_grace_s=0.1) as server, client_of(server, ask) as client:
        lost = asyncio.create_task(ask(client, stream=True))
        await until(lambda: backend.samplings)
        await asyncio.sleep(0.05)
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await until(lambda: backend.cancelled)
        backend.gate.set()
        assert await ask(client) == TEXT
    assert len(backend.records["t1"]) == 1


async def test_the_same_body_in_two_protocols_is_two_requests() -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.gate.clear()
    body = {"model": "m", "max_tokens": 50, "messages": HELLO}
    retry = {"x-stainless-retry-count": "1"}
    async with live(backend) as server, AsyncExitStack() as stack:
        client = await stack.enter_async_context(httpx.AsyncClient(headers=retry))
        asks = [
            asyncio.create_task(client.post(f"{server.url}/t/t1/v1/{path}", json=body))
            for path in ("chat/completions", "messages", "messages")
        ]
        await until(lambda: len(backend.samplings) == 2)
        await asyncio.sleep(0.05)
        backend.gate.set()
        told = [reply.json() for reply in await asyncio.gather(*asks)]
    assert [one.get("object", one.get("type")) for one in told] == ["chat.completion", "message", "message"]
    assert told[1]["id"] == told[2]["id"]  # the same sample, told twice
    assert len(backend.records["t1"]) == 2


async def test_a_server_that_ends_cuts_what_is_under_way_in_words() -> None:
    backend = ScriptedBackend(lambda _t, _p: TEXT)
    backend.gate.clear()
    async with live(backend) as server, server.anthropic() as client:
        stream = await client.messages.create(model="m", max_tokens=9, messages=HELLO, stream=True)
        await anext(stream)
        server.gateway.forget("t1")
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for _ in stream:
                pass
        await stream.close()
        assert caught.value.body["error"]["type"] == "overloaded_error"
    assert not backend.records
