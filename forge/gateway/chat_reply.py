"""Chat Completions replies: whole bodies and SSE chunks, built as plain dictionaries."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

from forge.gateway import wire
from forge.gateway.chat import ChatCodec
from forge.gateway.chat_request import ChatRequest, parse_chat_request
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError, openai_error
from forge.gateway.generation import Generation, Step
from forge.gateway.reading import ReplyPiece
from forge.gateway.reasoning import Reasoning, reasoning_tokens
from forge.gateway.tool_format import ToolCall
from forge.types import Json

DONE = b"data: [DONE]\n\n"
_CHUNK = "chat.completion.chunk"
#: stands for the text of a content chunk; no model or id holds it
_MARK = "\0text\0"


class ChatDialect:
    """POST /v1/chat/completions."""

    name = "chat"

    def __init__(self, codec: ChatCodec, model: str) -> None:
        self._codec = codec
        self._model = model

    def parse(self, data: Json, _trajectory: str) -> ChatRequest:
        return parse_chat_request(data)

    def reply(self, request: ChatRequest, choices: Choices) -> ChatReply:
        return ChatReply(request, choices, self._codec, request.model or self._model)

    def counted(self, tokens: int) -> Json:
        return {"prompt_tokens": tokens}

    def error(self, error: ApiError) -> tuple[int, Json]:
        return openai_error(error)


class ChatReply:
    """Every sampled token is counted in usage and listed in logprobs, the end-of-turn token too."""

    def __init__(self, request: ChatRequest, choices: Choices, codec: ChatCodec, model: str) -> None:
        self._include_usage = request.include_usage
        self._generations = choices.generations
        self._codec = codec
        self._frame = {"id": f"chatcmpl-{choices.generations[0].id}", "created": int(time.time()), "model": model}
        self._choices = [
            _Choice(index, one, codec, logprobs=request.logprobs) for index, one in enumerate(choices.generations)
        ]
        # The commonest chunk by far is written into a frame made once; json.dumps of a mere string is cheap.
        self._around = [self._chunk(one.choice({"content": _MARK})).rsplit(_MARKED, 1) for one in self._choices]

    def whole(self, choices: Sequence[Sequence[ReplyPiece]]) -> bytes:
        told = [one.whole(pieces) for one, pieces in zip(self._choices, choices, strict=True)]
        body = {**self._frame, "object": "chat.completion", "choices": told, "usage": self._usage()}
        return json.dumps(body | self._extra()).encode()

    def first(self) -> bytes:
        return b"".join(self._chunk(one.choice({"role": "assistant", "content": ""})) for one in self._choices)

    def chunk(self, choice: int, step: Step) -> bytes:
        one = self._choices[choice]
        if one.logprobs or len(step.pieces) != 1 or not isinstance(step.pieces[0], str):
            return b"".join(self._chunk(told) for told in one.deltas(step))
        before, after = self._around[choice]
        return before + json.dumps(step.pieces[0]).encode() + after

    def last(self) -> bytes:
        chunks = [self._chunk(one.end()) for one in self._choices[:-1]]
        chunks.append(self._chunk(self._choices[-1].end(), self._extra()))
        if self._include_usage:
            chunks.append(wire.event({**self._frame, "object": _CHUNK, "choices": [], "usage": self._usage()}))
        return b"".join(chunks) + DONE

    def keep_alive(self) -> bytes:
        return self._chunk(self._choices[0].choice({"content": ""}))

    def broken(self, error: ApiError) -> bytes:
        """The SDKs raise on it."""
        return wire.event(openai_error(error)[1])

    def _chunk(self, choice: Json, extra: Json | None = None) -> bytes:
        chunk = {**self._frame, "object": _CHUNK, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return wire.event(chunk | (extra or {}))

    def _usage(self) -> Json:
        return openai_usage(self._generations, self._codec)

    def _extra(self) -> Json:
        """A field of ours beside OpenAI's, only where there is something to say; clients ignore it."""
        malformed = sum(one.malformed for one in self._generations)
        return {"forge": {"malformed_tool_calls": malformed}} if malformed else {}


_MARKED = json.dumps(_MARK).encode()


class _Choice:
    """One of a reply's choices."""

    def __init__(self, index: int, generation: Generation, codec: ChatCodec, *, logprobs: bool) -> None:
        self._index = index
        self._generation = generation
        self._codec = codec
        self.logprobs = logprobs
        self._calls = 0
        self._told = 0

    def whole(self, pieces: Sequence[ReplyPiece]) -> Json:
        calls = [self._call(piece) for piece in pieces if isinstance(piece, ToolCall)]
        content = "".join(piece for piece in pieces if isinstance(piece, str))
        thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        message: Json = {"role": "assistant", "content": content or None if calls else content}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        choice: Json = {"index": self._index, "message": message, "finish_reason": self._finish_reason()}
        choice["logprobs"] = self._logprobs(len(self._generation.sampled_ids))
        return choice

    def deltas(self, step: Step) -> Iterator[Json]:
        """A chunk's choice for each piece."""
        for piece in step.pieces:
            logprobs = self._logprobs(step.upto)
            if isinstance(piece, str):
                yield self.choice({"content": piece}, logprobs)
            elif isinstance(piece, Reasoning):
                yield self.choice({"reasoning_content": piece.text}, logprobs)
            else:
                index = self._calls
                call = self._call(piece)
                # As OpenAI streams it: who is called first, then with what.
                head = {"index": index, **call, "function": {"name": piece.name, "arguments": ""}}
                yield self.choice({"tool_calls": [head]}, logprobs)
                yield self.choice({"tool_calls": [{"index": index, "function": {"arguments": piece.arguments}}]})

    def end(self) -> Json:
        return self.choice({}, self._logprobs(len(self._generation.sampled_ids)), self._finish_reason())

    def choice(self, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _call(self, piece: ToolCall) -> Json:
        function = {"name": piece.name, "arguments": piece.arguments}
        self._calls += 1
        return {"id": self._generation.call_id(self._calls - 1), "type": "function", "function": function}

    def _finish_reason(self) -> str:
        finish = self._generation.finish
        return "tool_calls" if self._calls and finish == "stop" else finish

    def _logprobs(self, upto: int) -> Json | None:
        """The tokens not told of yet, up to `upto`; None if nobody asked."""
        if not self.logprobs:
            return None
        ids = self._generation.sampled_ids[self._told : upto]
        values = self._generation.logprobs[self._told : upto]
        self._told = upto
        return {"content": [self._logprob(i, v) for i, v in zip(ids, values, strict=True)], "refusal": None}

    def _logprob(self, index: int, value: float) -> Json:
        token = self._codec.decode((index,))
        return {"token": token, "logprob": value, "bytes": list(token.encode()), "top_logprobs": []}


def openai_usage(generations: Sequence[Generation], codec: ChatCodec) -> Json:
    """Tokens as the engine saw and sampled them. A prompt that was answered several times counts once."""
    prompts = {id(one.job.prompt_ids): len(one.job.prompt_ids) for one in generations}
    prompt, sampled = sum(prompts.values()), sum(len(one.sampled_ids) for one in generations)
    usage: Json = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    thoughts = [one for one in generations if one.job.reader.reasoned]
    if thoughts:
        spent = sum(reasoning_tokens(codec.decode, one.sampled_ids) for one in thoughts)
        usage["completion_tokens_details"] = {"reasoning_tokens": spent}
    return usage
