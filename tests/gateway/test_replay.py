"""Recorded traffic of real agents, and many trajectories at once that must never mix."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path

import httpx
import pytest
from gateway_support import ScriptedBackend, live

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.tool_format import ToolCall, render

RECORDED = Path(__file__).parents[3] / "shared" / "gateway_requests"
CHAT = "/chat/completions"


def recorded_chats() -> list[dict[str, object]]:
    files = sorted(RECORDED.glob("*.json"))
    requests = [request for file in files for request in json.loads(file.read_text())]
    return [request for request in requests if request["path"].endswith(CHAT)]


async def test_recorded_agents_are_served() -> None:
    requests = recorded_chats()
    if not requests:
        pytest.skip(f"no recorded requests in {RECORDED}")
    backend = ScriptedBackend(lambda _t, _p: render("ok", [ToolCall("f", "{}")]))
    async with live(backend) as server, httpx.AsyncClient(timeout=30) as client:
        for request in requests:
            headers = {k: v for k, v in request["headers"].items() if k.lower() not in ("host", "content-length")}
            body = request["body"]
            reply = await client.post(server.url + request["path"], json=body, headers=headers)
            if body.get("tool_choice") == "required":  # smolagents: refused, not broken
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")
                body = {k: v for k, v in body.items() if k != "tool_choice"}
                reply = await client.post(server.url + request["path"], json=body, headers=headers)
            assert reply.status_code == 200, reply.text
            check_shape(reply.text, body)
            trajectory = request["path"].split("/")[2]
            text = FakeChatCodec().decode(backend.records[trajectory][-1].prompt_ids)
            last = body["messages"][-1]["content"]
            assert last if isinstance(last, str) else last[0]["text"] in text


def check_shape(text: str, body: dict[str, object]) -> None:
    """A valid whole reply, or a valid stream with usage if asked for, in which the call is there if tools were."""
    if not body.get("stream"):
        message = json.loads(text)["choices"][0]["message"]
        assert bool(message.get("tool_calls")) == bool(body.get("tools"))
        return
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    usages = [chunk for chunk in chunks if not chunk["choices"]]
    wants_usage = bool(body.get("stream_options"))
    assert [chunk["usage"]["total_tokens"] > 0 for chunk in usages] == [True] * wants_usage
    calls = [chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["delta"].get("tool_calls")]
    assert bool(calls) == bool(body.get("tools"))


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
