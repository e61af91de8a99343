"""Recorded traffic of real agents, and many trajectories at once that must never mix.

`recorded/` holds what seventeen programs sent, request by request, with the reply each got there. A replay gives the
same replies, but ids of calls are the gateway's own, so they are put in place of the recorded ones wherever the program
echoes them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gateway_support import ScriptedBackend, live

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.recovery import Fork
from forge.gateway.tool_format import ToolCall, render
from forge.types import Completion, Json

RECORDED = Path(__file__).parent / "recorded"
CHAT = "/chat/completions"
Tree = list[tuple[int | None, Fork | None]]

ONE_CONVERSATION: Tree = [(None, Fork.ROOT), (0, None)]
#: a call for a title comes first, then the conversation
AFTER_A_TITLE: Tree = [(None, Fork.ROOT), (None, Fork.APART), (1, None)]
#: of each completion, which one's reply it goes on from, and why not plainly; read off the recordings, by hand
TREES: dict[str, Tree] = {
    "ag2": ONE_CONVERSATION,
    # The second request asks for a commit message: its own system prompt, and the reply quoted.
    "aider": [(None, Fork.ROOT), (None, Fork.APART)],
    "autogen-team": [
        (None, Fork.ROOT),
        # Alice reflects on her tool's result: her messages, but without the tools.
        (None, Fork.TOOLS),
        # Bob has Alice's system prompt and task, and hears her words as a user's.
        (None, Fork.APART),
        # Alice again, with tools: her call is completion 0's, her reflection was sampled without them.
        (0, Fork.TOOLS),
    ],
    "codex": ONE_CONVERSATION,
    "codex-mcp": ONE_CONVERSATION,
    "langchain": ONE_CONVERSATION,
    # Every other request asks for a summary, which the next one begins with.
    "langchain-summarization": [
        *ONE_CONVERSATION,
        *[(None, Fork.APART), (None, Fork.COMPACTION)] * 3,
    ],
    "mini-swe-agent": ONE_CONVERSATION,
    "mini-swe-agent-text": [
        (None, Fork.ROOT),
        # A reply without a call is left out, and an error stands where it was; twice.
        (None, Fork.TRUNCATION),
        (None, Fork.TRUNCATION),
        (2, None),
        (2, Fork.TRUNCATION),
        (2, Fork.TRUNCATION),
        # Begun again for a model that writes its commands into the text.
        (None, Fork.TOOLS),
        (6, None),
    ],
    "openai-agents-responses": ONE_CONVERSATION,
    "opencode-chat": [
        (None, Fork.ROOT),  # the title
        (None, Fork.APART),
        # Its task is an argument of completion 1's call; it ends before that call has a result.
        (None, Fork.SUB_AGENT),
        (2, None),
        (1, None),
    ],
    "opencode-responses": AFTER_A_TITLE,
    "opencode-title-and-turns": AFTER_A_TITLE,
    "pi": ONE_CONVERSATION,
    "pydantic-ai": ONE_CONVERSATION,
    "qwen-code": ONE_CONVERSATION,
    # The call comes back as prose.
    "smolagents-tool": [(None, Fork.ROOT), (None, Fork.REWRITE)],
}
#: how replies come back where not exactly
ECHOES = {
    **{key: {"arguments_rewritten": 1} for key in ("pi", "pydantic-ai", "qwen-code")},
    **{key: {"arguments_rewritten": 1} for key in ("opencode-responses", "opencode-title-and-turns")},
    "opencode-chat": {"arguments_rewritten": 2},
    "autogen-team": {"exact": 1},
    "mini-swe-agent-text": {"exact": 4},
    **{key: {} for key in ("aider", "smolagents-tool")},
}


def test_every_recording_has_its_tree() -> None:
    assert {file.stem for file in RECORDED.glob("*.json")} == set(TREES)


@pytest.mark.parametrize("name", TREES)
async def test_recorded_agents_get_the_right_tree(name: str) -> None:
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    replies = iter([spoken(request["reply"]) for request in recorded])
    backend = ScriptedBackend(lambda _t, _p: next(replies))
    ids: dict[str, str] = {}
    trajectory = recorded[0]["path"].split("/")[2]
    async with live(backend) as server, httpx.AsyncClient(timeout=30) as client:
        for request in recorded:
            body = with_our_ids(request["body"], ids)
            reply = await client.post(server.url + request["path"], json=body, headers=request["headers"])
            check_reply(request, reply)
            calls = [call.get("id") for call in request["reply"]["calls"]]
            ids |= {old: new for old, new in zip(calls, ids_in(reply.text), strict=True) if old}
            shown = FakeChatCodec().decode(backend.records[trajectory][-1].prompt_ids)
            for text in (*texts_of(body.get("messages")), *texts_of(body.get("input"))):
                assert text in shown
        tree = server.gateway.tree(trajectory)
    records = backend.records[trajectory]
    assert [(record.parent, record.fork) for record in records] == TREES[name]
    assert tree.echoes == ECHOES.get(name, {"exact": 1})
    check_ids(records)


def spoken(reply: Json) -> str:
    """What a model samples for a recorded reply."""
    thought = f"<think>\n{reply['reasoning']}\n</think>\n\n" if reply.get("reasoning") else ""
    return thought + render(reply["text"], [ToolCall(call["name"], call["arguments"]) for call in reply["calls"]])


def with_our_ids(body: Json, ids: dict[str, str]) -> Json:
    text = json.dumps(body)
    for old, new in ids.items():
        text = text.replace(old, new)
    made: Json = json.loads(text)
    return made


def ids_in(reply: str) -> list[str]:
    """Of the calls in a reply, in their order."""
    return list(dict.fromkeys(re.findall(r'"(call_[0-9a-f]+)"', reply)))


def check_ids(records: list[Completion]) -> None:
    """A completion that goes on from another begins with the very ids that the engine saw and sampled there."""
    for record in records:
        if record.parent is not None:
            whole = records[record.parent].prompt_ids + records[record.parent].sampled_ids
            assert record.prompt_ids[: len(whole)] == whole


def check_reply(request: Json, reply: httpx.Response) -> None:
    assert reply.status_code == 200, reply.text
    body = request["body"]
    assert reply.headers.get("x-forge-unenforced") == ("tool_choice" if body.get("tool_choice") == "required" else None)
    if request["path"].endswith(CHAT):
        check_chat(reply.text, body, request["reply"])
    else:
        check_response(reply.text, body, request["reply"])


def texts_of(messages: list[Json] | None) -> Iterator[str]:
    """Every text of a history, whatever its protocol calls it."""
    for message in messages or []:
        content = message.get("content") or message.get("output") or ""
        yield from [content] if isinstance(content, str) else (part["text"] for part in content)


def check_chat(text: str, body: Json, expected: Json) -> None:
    """A valid whole reply, or a valid stream with usage if asked for: the recorded text and calls."""
    calls = [call["name"] for call in expected["calls"]]
    if not body.get("stream"):
        message = json.loads(text)["choices"][0]["message"]
        assert (message["content"] or "") == expected["text"]
        assert [call["function"]["name"] for call in message.get("tool_calls") or ()] == calls
        return
    *events, done, empty = text.split("\n\n")
    assert (done, empty) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    usages = [chunk for chunk in chunks if not chunk["choices"]]
    wants_usage = bool(body.get("stream_options"))
    assert [chunk["usage"]["total_tokens"] > 0 for chunk in usages] == [True] * wants_usage
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected["text"]
    named = [call["function"].get("name") for delta in deltas for call in delta.get("tool_calls") or ()]
    assert [name for name in named if name] == calls


def check_response(text: str, body: Json, expected: Json) -> None:
    """A completed response, or a stream that ends in one: the recorded text and calls."""
    last = json.loads(text.split("\n\n")[-2].split("data: ")[1]) if body.get("stream") else None
    assert last is None or last["type"] == "response.completed"
    response = last["response"] if last else json.loads(text)
    assert response["status"] == "completed"
    said = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    assert said == ([expected["text"]] if expected["text"] else [])
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    named = [f"{c['namespace']}__{c['name']}" if c.get("namespace") else c["name"] for c in calls]
    assert named == [call["name"] for call in expected["calls"]]


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
