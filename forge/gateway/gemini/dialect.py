"""Gemini's generateContent, whole and as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Sequence

from forge.gateway import wire
from forge.gateway.chat import ChatCodec
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError
from forge.gateway.gemini.errors import gemini_error
from forge.gateway.gemini.request import parse_gemini_request
from forge.gateway.generation import Generation, Step
from forge.gateway.reading import ReplyPiece
from forge.gateway.reasoning import Reasoning, reasoning_tokens
from forge.gateway.request import Request
from forge.gateway.tool_format import ToolCall
from forge.types import Json


class GeminiDialect:
    """POST /v1beta/models/{any}:generateContent, or with `stream` :streamGenerateContent."""

    def __init__(self, codec: ChatCodec, model: str, *, stream: bool) -> None:
        self.name = "gemini-stream" if stream else "gemini"
        self._codec = codec
        self._model = model
        self._stream = stream

    def parse(self, data: Json, _trajectory: str) -> Request:
        return parse_gemini_request(data, stream=self._stream)

    def reply(self, _request: Request, choices: Choices) -> GeminiReply:
        return GeminiReply(choices, self._codec, self._model)

    def counted(self, tokens: int) -> Json:
        return {"totalTokens": tokens}

    def error(self, error: ApiError) -> tuple[int, Json]:
        return gemini_error(error)


class GeminiReply:
    """Every chunk of a stream is a response of its own; the last one has the reasons and the usage."""

    def __init__(self, choices: Choices, codec: ChatCodec, model: str) -> None:
        self._generations = choices.generations
        self._codec = codec
        self._frame = {"modelVersion": model, "responseId": choices.generations[0].id}
        self._calls = [0] * len(choices.generations)

    def whole(self, choices: Sequence[Sequence[ReplyPiece]]) -> bytes:
        told = [self._candidate(at, pieces, end=True) for at, pieces in enumerate(choices)]
        return wire.dump({"candidates": told, "usageMetadata": self._usage(), **self._frame})

    def first(self) -> bytes:
        return b""

    def chunk(self, choice: int, step: Step) -> bytes:
        return wire.event({"candidates": [self._candidate(choice, step.pieces)], **self._frame})

    def last(self) -> bytes:
        told = [self._candidate(at, (), end=True) for at in range(len(self._generations))]
        return wire.event({"candidates": told, "usageMetadata": self._usage(), **self._frame})

    def keep_alive(self) -> bytes:
        return wire.event({"candidates": [self._candidate(0, [""])], **self._frame})

    def broken(self, error: ApiError) -> bytes:
        return wire.event(gemini_error(error)[1])

    def _candidate(self, at: int, pieces: Sequence[ReplyPiece], *, end: bool = False) -> Json:
        parts: list[Json] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                call_id = self._generations[at].call_id(self._calls[at])
                self._calls[at] += 1
                call = {"id": call_id, "name": piece.name, "args": json.loads(piece.arguments)}
                parts.append({"functionCall": call})
            else:
                _append(parts, piece)
        candidate: Json = {"content": {"role": "model", "parts": parts}, "index": at}
        if end:
            candidate["finishReason"] = "MAX_TOKENS" if self._generations[at].finish == "length" else "STOP"
        return candidate

    def _usage(self) -> Json:
        prompt, generations = len(self._generations[0].job.prompt_ids), self._generations
        sampled = sum(len(one.sampled_ids) for one in generations)
        thought = sum(map(self._thought, generations))
        return {
            "promptTokenCount": prompt,
            "candidatesTokenCount": sampled - thought,
            "thoughtsTokenCount": thought,
            "totalTokenCount": prompt + sampled,
        }

    def _thought(self, one: Generation) -> int:
        return reasoning_tokens(self._codec.decode, one.sampled_ids) if one.job.reader.reasoned else 0


def _append(parts: list[Json], piece: str | Reasoning) -> None:
    """Text goes on with the part before it, if that is of its kind."""
    new: Json = {"text": piece.text, "thought": True} if isinstance(piece, Reasoning) else {"text": piece}
    if parts and parts[-1].keys() == new.keys():
        parts[-1]["text"] += new["text"]
    else:
        parts.append(new)
