"""One normal form: what a client echoes of a reply, in whatever protocol, reads as the reply it was given."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_support import ScriptedBackend
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.gateway.anthropic.dialect import MessagesDialect
from forge.gateway.chat_reply import ChatDialect
from forge.gateway.conversation import json_text
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.gateway import Gateway
from forge.gateway.gemini.dialect import GeminiDialect
from forge.gateway.protocol import AnyDialect
from forge.gateway.responses.dialect import ResponsesDialect
from forge.gateway.tool_format import ToolCall, render
from forge.types import Json

codec = FakeChatCodec()
HELLO = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object"}
names = st.sampled_from(["add", "sub"])
said = st.text("ab \n<é", max_size=8).map(lambda text: text.lstrip("\n"))
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = numbers | st.text(max_size=4) | st.lists(st.none(), max_size=2)
given_arguments = st.dictionaries(said, values, max_size=2)


@st.composite
def replies(draw: st.DrawFn) -> str:
    """What a policy may sample: perhaps a thought, perhaps text, some calls, however their JSON is laid out."""
    calls = [
        ToolCall(draw(names), json.dumps(draw(given_arguments), indent=draw(st.sampled_from([None, 1]))))
        for _ in range(draw(st.integers(0, 3)))
    ]
    thought = draw(st.text("xy \n", max_size=6))
    return (f"<think>\n{thought}\n</think>\n\n" if draw(st.booleans()) else "") + render(draw(said), calls)


class Chat:
    dialect: AnyDialect = ChatDialect(codec, "m")
    bytes_kept = True

    def body(self, reply: Json | None) -> Json:
        echo = [reply["choices"][0]["message"]] if reply else []
        tools = [{"type": "function", "function": {"name": n, "parameters": SCHEMA}} for n in ("add", "sub")]
        return {"messages": [HELLO, *echo], "tools": tools}


class Responses:
    dialect: AnyDialect = ResponsesDialect(codec, "m")
    bytes_kept = True

    def body(self, reply: Json | None) -> Json:
        echo = reply["output"] if reply else []
        return {"input": [HELLO, *echo], "tools": [{"type": "function", "name": n} for n in ("add", "sub")]}


class SealedResponses(Responses):
    """As codex echoes: no content of reasoning, only what was sealed."""

    def body(self, reply: Json | None) -> Json:
        body = super().body(reply)
        for item in body["input"]:
            if item.get("type") == "reasoning":
                item.pop("content")
        return body


class Messages:
    dialect: AnyDialect = MessagesDialect("m")
    bytes_kept = False

    def body(self, reply: Json | None) -> Json:
        echo = [{"role": "assistant", "content": reply["content"]}] if reply else []
        return {"messages": [HELLO, *echo], "tools": [{"name": n, "input_schema": SCHEMA} for n in ("add", "sub")]}


class Gemini:
    dialect: AnyDialect = GeminiDialect(codec, "m", stream=False)
    bytes_kept = False

    def body(self, reply: Json | None) -> Json:
        echo = [reply["candidates"][0]["content"]] if reply else []
        declared = [{"name": n, "parameters": SCHEMA} for n in ("add", "sub")]
        return {"contents": [{"parts": [{"text": "hello"}]}, *echo], "tools": [{"functionDeclarations": declared}]}


async def told(protocol: Any, text: str) -> tuple[Json, Json]:
    """(the reply in its protocol, the reply in normal form)."""
    backend = ScriptedBackend(lambda _t, _p: text)
    gateway = Gateway(backend, codec, pin_sampling=False, retry_grace_s=0)
    request = protocol.dialect.parse(protocol.body(None), "t")
    choices = gateway.start(("t", protocol.dialect.name, b""), request, backend.open("t")).flight
    pieces = [piece async for _, step in choices.steps() if step for piece in step.pieces]
    reply = protocol.dialect.reply(request, choices)
    return json.loads(reply.whole([pieces])), choices.generations[0].message


def rewritten(message: Json) -> Json:
    """Its arguments as a protocol that carries objects gives them back."""
    calls = [
        call | {"function": call["function"] | {"arguments": json_text(json.loads(call["function"]["arguments"]))}}
        for call in message.get("tool_calls", [])
    ]
    return message | ({"tool_calls": calls} if calls else {})


PROTOCOLS = [Chat(), Responses(), SealedResponses(), Messages(), Gemini()]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: type(protocol).__name__)
@settings(deadline=None, max_examples=60)
@given(replies())
def test_an_echo_is_the_reply(protocol: Any, text: str) -> None:
    reply, message = asyncio.run(told(protocol, text))
    messages = protocol.dialect.parse(protocol.body(reply), "t").messages
    assert messages[0] == HELLO
    assert len(messages) == 2
    assert messages[1] == (message if protocol.bytes_kept else rewritten(message))
