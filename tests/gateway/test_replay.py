"""Recorded traffic of real agents, and many trajectories at once that must never mix."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_support import ScriptedBackend, live

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.tool_format import ToolCall, render

RECORDED = Path(__file__).parents[3] / "shared" / "gateway_requests"
CHAT = "/chat/completions"
SAID = "<think>\nhm\n</think>\n\n" + render("ok", [ToolCall("f", "{}")])


@pytest.mark.parametrize("file", sorted(RECORDED.glob("*.json")) or [None], ids=lambda file: file and file.stem)
async def test_recorded_agents_are_served(file: Path | None) -> None:
    if file is None:
        pytest.skip(f"no recorded requests in {RECORDED}")
    backend = ScriptedBackend(lambda _t, _p: SAID)
    async with live(backend) as server, httpx.AsyncClient(timeout=30) as client:
        for request in json.loads(file.read_text()):
            headers = {k: v for k, v in request["headers"].items() if k.lower() not in ("host", "content-length")}
            reply = await client.post(server.url + request["path"], json=request["body"], headers=headers)
            check_reply(request, reply)
            trajectory = request["path"].split("/")[2]
            text = FakeChatCodec().decode(backend.records[trajectory][-1].prompt_ids)
            for shown in (*texts_of(request["body"].get("messages")), *texts_of(request["body"].get("input"))):
                assert shown in text


def check_reply(request: dict[str, object], reply: httpx.Response) -> None:
    assert reply.status_code == 200, reply.text
    body = request["body"]
    assert reply.headers.get("x-forge-unenforced") == ("tool_choice" if body.get("tool_choice") == "required" else None)
    if request["path"].endswith(CHAT):
        check_chat(reply.text, body)
    else:
        check_response(reply.text, body)


def texts_of(messages: list[dict[str, object]] | None) -> Iterator[str]:
    """Every text of a history, whatever its protocol calls it."""
    for message in messages or []:
        content = message.get("content") or message.get("output") or ""
        yield from [content] if isinstance(content, str) else (part["text"] for part in content)


def check_chat(text: str, body: dict[str, object]) -> None:
    """A valid whole reply, or a valid stream with usage if asked for, in which the call is there if tools were."""
    if not body.get("stream"):
        message = json.loads(text)["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == bool(body.get("tools"))
        assert message["reasoning_content"] == "hm"
        return
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    usages = [chunk for chunk in chunks if not chunk["choices"]]
    wants_usage = bool(body.get("stream_options"))
    assert [chunk["usage"]["total_tokens"] > 0 for chunk in usages] == [True] * wants_usage
    calls = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("tool_calls")]
    assert bool(calls) == bool(body.get("tools"))


def check_response(text: str, body: dict[str, object]) -> None:
    """A completed response, or a stream that ends in one, whose call is there if tools were."""
    last = json.loads(text.split("\n\n")[-2].split("data: ")[1]) if body.get("stream") else None
    assert last is None or last["type"] == "response.completed"
    response = last["response"] if last else json.loads(text)
    assert response["status"] == "completed"
    calls = ["function_call"] if body.get("tools") else []
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", *calls]
    assert response["output"][1]["content"][0]["text"].startswith("ok")


@pytest.mark.parametrize("seed", range(2))
async def test_trajectories_never_mix(seed: int) -> None:
    rng = random.Random(seed)
    backend = ScriptedBackend(lambda trajectory, prompt: f"{trajectory} heard {prompt[-12:]}")
    async with live(backend) as server, httpx.AsyncClient(timeout=30) as client:

        async def agent(trajectory: str) -> None:
            messages: list[dict[str, str]] = []
            for turn in range(rng.randint(1, 5)):
                await asyncio.sleep(rng.random() * 0.01)
                said = f"{trajectory} turn {turn}"[-12:]
                messages.append({"role": "user", "content": said})
                stream = rng.random() < 0.5
                url = f"{server.url}/t/{trajectory}/v1{CHAT}"
                reply = await client.post(url, json={"messages": messages, "stream": stream})
                text = whole_text(reply.text, stream)
                assert text == f"{trajectory} heard {''.join(m['content'] for m in messages)[-12:]}"
                messages.append({"role": "assistant", "content": text})

        names = [f"traj-{i}" for i in range(16)]
        await asyncio.gather(*map(agent, names))
    for name in names:
        records = backend.records[name]
        assert [record.index for record in records] == list(range(len(records)))
        for earlier, later in itertools.pairwise(records):
            served = earlier.prompt_ids + earlier.sampled_ids
            assert later.prompt_ids[: len(served)] == served


def whole_text(text: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = text.split("\n\n")[:-2]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    return "".join(delta.get("content", "") for delta in deltas)
