"""A chat codec without a model: one token a byte, one marker a role. For tests, and for gateways without weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from forge.gateway.chat_template import ChatError
from forge.gateway.reasoning import CLOSE, OPEN, ReasoningStream
from forge.gateway.tool_format import HermesStream, ToolStream
from forge.types import Json

END = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}
VOCAB_SIZE = 261


class Turn(NamedTuple):
    """One of a prompt: "system" (the tools come as one of their own, first), "user", "assistant", "tool"."""

    role: str
    text: str


class FakeChatCodec:
    """Token ids 0-255 are UTF-8 bytes, 256 ends a turn, 257-260 open a system, user, assistant or tool turn.

    Reasoning of past turns is rendered in its tags, calls as JSON. A sampled id maps back to the very byte, so tests
    can say what a model answers and read what it was asked.
    """

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return (END,)

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json]) -> tuple[int, ...]:
        ids: list[int] = []
        if tools:
            ids += [ROLES["system"], *self.encode(json.dumps(list(tools))), END]
        return (*ids, *self._turns(messages), ROLES["assistant"])

    def continuation(
        self,
        before: Sequence[Json],  # noqa: ARG002 - what was said is not shown anew
        after: Sequence[Json],
        tools: Sequence[Json],  # noqa: ARG002
        last_id: int,
    ) -> tuple[int, ...]:
        return (*(() if last_id == END else (END,)), *self._turns(after), ROLES["assistant"])

    def _turns(self, messages: Sequence[Json]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            calls = message.get("tool_calls")
            thought = message.get("reasoning_content")
            text = f"{OPEN}{thought}{CLOSE}" if thought else ""
            text += message["content"] + (json.dumps(calls) if calls else "")
            ids += [ROLES[message["role"]], *self.encode(text), END]
        return ids

    def encode(self, text: str) -> tuple[int, ...]:
        try:
            return tuple(text.encode())
        except UnicodeEncodeError as error:
            raise ChatError("the messages hold half a surrogate pair, which is no text") from error

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(index for index in ids if index < END).decode(errors="replace")

    def tool_stream(self, _tools: Sequence[Json] = ()) -> ToolStream:
        return HermesStream()

    def reasoning_stream(self, _prompt_ids: Sequence[int]) -> ReasoningStream | None:
        return ReasoningStream(opened=False)


def turns(ids: Sequence[int]) -> list[Turn]:
    """A prompt, or its end from a turn's marker on; the last is the empty one in which the reply will be."""
    names = {marker: role for role, marker in ROLES.items()}
    found: list[tuple[str, list[int]]] = []
    for one in ids:
        if one in names:
            found.append((names[one], []))
        elif found:
            found[-1][1].append(one)
    return [Turn(role, FakeChatCodec().decode(text)) for role, text in found]
