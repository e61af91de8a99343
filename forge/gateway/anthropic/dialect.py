"""Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from forge.gateway import wire
from forge.gateway.anthropic.errors import anthropic_error
from forge.gateway.anthropic.request import parse_messages_request
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError
from forge.gateway.generation import Step
from forge.gateway.reading import ReplyPiece
from forge.gateway.reasoning import Reasoning
from forge.gateway.request import Request
from forge.gateway.tool_format import ToolCall
from forge.types import Json

#: clients refuse a thought without one before they echo it; nobody reads it
_SIGNATURE = "Zm9yZ2U="


class MessagesDialect:
    """POST /v1/messages, with or without ?beta=true."""

    name = "messages"

    def __init__(self, model: str) -> None:
        self._model = model

    def parse(self, data: Json, _trajectory: str) -> Request:
        return parse_messages_request(data)

    def reply(self, request: Request, choices: Choices) -> MessagesReply:
        return MessagesReply(choices, request.model or self._model)

    def counted(self, tokens: int) -> Json:
        return {"input_tokens": tokens}

    def error(self, error: ApiError) -> tuple[int, Json]:
        return anthropic_error(error)


class MessagesReply:
    """A message of blocks: thoughts, text and tool uses, in the order they were sampled."""

    def __init__(self, choices: Choices, model: str) -> None:
        (self._generation,) = choices.generations
        self._model = model
        self._index = -1
        self._open = ""  # type of the open block
        self._calls = 0

    def whole(self, choices: Sequence[Sequence[ReplyPiece]]) -> bytes:
        blocks: list[Json] = []
        for piece in choices[0]:
            kind, text = _text_of(piece)
            if isinstance(piece, ToolCall):
                blocks.append({**self._tool_use(piece), "input": json.loads(piece.arguments)})
            elif blocks and blocks[-1]["type"] == kind:
                blocks[-1][kind] += text
            else:
                blocks.append({"type": kind, kind: text} | ({"signature": _SIGNATURE} if kind == "thinking" else {}))
        return wire.dump(self._message(blocks, self._generation.finish, len(self._generation.sampled_ids)))

    def first(self) -> bytes:
        return _event("message_start", message=self._message([], "", 0)) + self.keep_alive()

    def chunk(self, _choice: int, step: Step) -> bytes:
        return b"".join(event for piece in step.pieces for event in self._deltas(piece))

    def last(self) -> bytes:
        ended = {
            "stop_reason": self._stop_reason(self._generation.finish),
            "stop_sequence": self._generation.stop_string,
        }
        usage = self._usage(len(self._generation.sampled_ids))
        return b"".join((*self._close(), _event("message_delta", delta=ended, usage=usage), _event("message_stop")))

    def keep_alive(self) -> bytes:
        return _event("ping")

    def broken(self, error: ApiError) -> bytes:
        # A stream is worth asking for again whatever broke it, and of all kinds agents do so for this one alone.
        told = ApiError(503, error.message) if error.status >= 500 else error
        return wire.event(anthropic_error(told)[1], "error")

    def _deltas(self, piece: ReplyPiece) -> Iterator[bytes]:
        kind, text = _text_of(piece)
        if isinstance(piece, ToolCall):
            yield from self._begin({**self._tool_use(piece), "input": {}})
            delta = {"type": "input_json_delta", "partial_json": piece.arguments}
        else:
            if self._open != kind:
                yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
            delta = {"type": f"{kind}_delta", kind: text}
        yield self._delta(delta)

    def _begin(self, block: Json) -> Iterator[bytes]:
        yield from self._close()
        self._index += 1
        self._open = block["type"]
        yield _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, delta: Json) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _tool_use(self, piece: ToolCall) -> Json:
        self._calls += 1
        return {"type": "tool_use", "id": self._generation.call_id(self._calls - 1), "name": piece.name}

    def _message(self, blocks: list[Json], finish: str, sampled: int) -> Json:
        """`finish` "": the reply has only begun."""
        return {
            "id": f"msg_{self._generation.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            "stop_reason": self._stop_reason(finish) if finish else None,
            "stop_sequence": self._generation.stop_string if finish else None,
            "usage": {"input_tokens": len(self._generation.job.prompt_ids), **self._usage(sampled)},
        }

    def _usage(self, sampled: int) -> Json:
        """What engines reuse of a prompt is not told: all of it counts as input."""
        return {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": sampled}

    def _stop_reason(self, finish: str) -> str:
        if finish == "length":
            return "max_tokens"
        if self._generation.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self._calls else "end_turn"


def _text_of(piece: ReplyPiece) -> tuple[str, str]:
    """(type of its block, text); a block's type is also the name of its text."""
    if isinstance(piece, ToolCall):
        return "tool_use", ""
    return ("thinking", piece.text) if isinstance(piece, Reasoning) else ("text", piece)


def _event(kind: str, **told: object) -> bytes:
    return wire.event({"type": kind, **told}, kind)
