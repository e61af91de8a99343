"""Chat Completions replies: whole bodies and SSE chunks, built as plain dictionaries."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator

from forge.gateway.chat import ChatCodec
from forge.gateway.chat_request import ChatRequest
from forge.gateway.generation import Generation, Step
from forge.gateway.tool_format import ToolCall
from forge.types import Json

DONE = b"data: [DONE]\n\n"
_ids = itertools.count()
_run = secrets.token_hex(6)
#: stands for the text of a content chunk; no model or id holds it
_MARK = "\0text\0"


def mint(prefix: str) -> str:
    """An id no other reply of this or any other process has."""
    return f"{prefix}{_run}{next(_ids):08x}"


class ChatReply:
    """Writes one generation in OpenAI's shape: `whole`, or `chunks` of each step and then `last_chunks`.

    Every sampled token is counted in usage and listed in logprobs, the end-of-turn token too.
    """

    def __init__(self, request: ChatRequest, generation: Generation, codec: ChatCodec, model: str) -> None:
        self._request = request
        self._generation = generation
        self._codec = codec
        self._frame = {"id": mint("chatcmpl-"), "created": int(time.time()), "model": model}
        self._calls = 0
        self._told = 0
        # The commonest chunk by far is written into a frame made once; json.dumps of a mere string is cheap.
        self._before_text, self._after_text = self._chunk({"content": _MARK}).split(json.dumps(_MARK).encode())

    def whole(self, steps: list[Step]) -> bytes:
        pieces = [piece for step in steps for piece in step.pieces]
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        message: Json = {"role": "assistant", "content": content or None if calls else content}
        if calls:
            message["tool_calls"] = calls
        choice: Json = {"index": 0, "message": message, "finish_reason": self._finish_reason()}
        choice["logprobs"] = self._logprobs(len(self._generation.sampled_ids))
        body = {**self._frame, "object": "chat.completion", "choices": [choice], "usage": self._usage()}
        return json.dumps(body | self._extra()).encode()

    def first_chunk(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def chunks(self, step: Step) -> Iterator[bytes]:
        for piece in step.pieces:
            logprobs = self._logprobs(step.upto)
            if isinstance(piece, str):
                plain = logprobs is None
                yield self._text(piece) if plain else self._chunk({"content": piece}, logprobs=logprobs)
                continue
            index = self._calls
            call = self._call(piece)
            # As OpenAI streams it: who is called first, then with what.
            head = {"index": index, **call, "function": {"name": piece.name, "arguments": ""}}
            yield self._chunk({"tool_calls": [head]}, logprobs=logprobs)
            yield self._chunk({"tool_calls": [{"index": index, "function": {"arguments": piece.arguments}}]})

    def last_chunks(self) -> Iterator[bytes]:
        logprobs = self._logprobs(len(self._generation.sampled_ids))
        yield self._chunk({}, logprobs=logprobs, finish=self._finish_reason(), extra=self._extra())
        if self._request.include_usage:
            yield _event({**self._frame, "object": _CHUNK, "choices": [], "usage": self._usage()})
        yield DONE

    def _text(self, piece: str) -> bytes:
        return self._before_text + json.dumps(piece).encode() + self._after_text

    def _chunk(
        self, delta: Json, *, logprobs: Json | None = None, finish: str | None = None, extra: Json | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._frame, "object": _CHUNK, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None
        return _event(chunk | (extra or {}))

    def _call(self, piece: ToolCall) -> Json:
        self._calls += 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"id": mint("call_"), "type": "function", "function": function}

    def _finish_reason(self) -> str:
        finish = self._generation.finish
        return "tool_calls" if self._calls and finish == "stop" else finish

    def _usage(self) -> Json:
        prompt, sampled = len(self._generation.job.prompt_ids), len(self._generation.sampled_ids)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _extra(self) -> Json:
        """A field of ours beside OpenAI's, only where there is something to say; clients ignore it."""
        malformed = self._generation.malformed
        return {"forge": {"malformed_tool_calls": malformed}} if malformed else {}

    def _logprobs(self, upto: int) -> Json | None:
        """The tokens not told of yet, up to `upto`; None if nobody asked."""
        if not self._request.logprobs:
            return None
        ids = self._generation.sampled_ids[self._told : upto]
        values = self._generation.logprobs[self._told : upto]
        self._told = upto
        return {"content": [self._logprob(i, v) for i, v in zip(ids, values, strict=True)], "refusal": None}

    def _logprob(self, index: int, value: float) -> Json:
        token = self._codec.decode((index,))
        return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}


_CHUNK = "chat.completion.chunk"


def error_event(body: bytes) -> bytes:
    """An error after the head has been sent: the SDKs raise on it."""
    return b"data: " + body + b"\n\n"


def _event(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"
