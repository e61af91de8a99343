"""OpenAI's legacy completions: a prompt that is no conversation, continued as plain text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from forge.gateway import fields, wire
from forge.gateway.chat import ChatCodec
from forge.gateway.chat_reply import DONE, openai_usage
from forge.gateway.chat_request import ChatRequest
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError, invalid, openai_error
from forge.gateway.fields import typed
from forge.gateway.generation import Step
from forge.gateway.reading import ReplyPiece
from forge.gateway.request import RawPrompt
from forge.types import Json

#: the protocol's own default, which its clients rely on
_MAX_TOKENS = 16


class CompletionsDialect:
    """POST /v1/completions."""

    name = "completions"

    def __init__(self, codec: ChatCodec, model: str) -> None:
        self._codec = codec
        self._model = model

    def parse(self, data: Json, _trajectory: str) -> ChatRequest:
        return parse_completions_request(data)

    def reply(self, request: ChatRequest, choices: Choices) -> CompletionsReply:
        return CompletionsReply(request, choices, self._codec, request.model or self._model)

    def counted(self, tokens: int) -> Json:
        return {"prompt_tokens": tokens}

    def error(self, error: ApiError) -> tuple[int, Json]:
        return openai_error(error)


def parse_completions_request(data: Json) -> ChatRequest:
    n = fields.integer(data, "n", 1) or 1
    if (fields.integer(data, "best_of", 1) or n) != n:
        raise invalid("best_of", f"best_of must be n, which is {n}: choices are sampled, not selected.")
    for key in ("echo", "suffix"):
        if data.get(key):
            raise invalid(key, f"{key} is not supported: the reply is what was sampled after the prompt.")
    logprobs = fields.integer(data, "logprobs", 0)
    if logprobs:
        raise invalid("logprobs", "Only the sampled token's log probability is known; use logprobs 0.")
    options = typed(data, "stream_options", dict) or {}
    return ChatRequest(
        model=typed(data, "model", str) or "",
        prompts=_prompts(data.get("prompt")),
        n=n,
        overlooked=fields.given(data, "frequency_penalty", "presence_penalty", "logit_bias"),
        stream=typed(data, "stream", bool) or False,
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs is not None,
        stop=fields.stops(data, "stop"),
        max_tokens=fields.integer(data, "max_tokens", 1) or _MAX_TOKENS,
        temperature=fields.number(data, "temperature", 0.0, 2.0),
        top_p=fields.top_p(data),
        seed=fields.seed(data),
    )


def _prompts(value: Any) -> tuple[RawPrompt, ...]:
    """One prompt or several, each a text or a list of token ids."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _are_ids(value):
            return (tuple(value),)
        if all(isinstance(one, str) or (isinstance(one, list) and _are_ids(one)) for one in value):
            return tuple(one if isinstance(one, str) else tuple(one) for one in value)
    raise invalid("prompt", "prompt must be a string, a list of token ids, or a list of either.")


def _are_ids(value: list[Any]) -> bool:
    return all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 2**31 for one in value)


class CompletionsReply:
    """Text as it was sampled: no call and no reasoning is told apart in it."""

    def __init__(self, request: ChatRequest, choices: Choices, codec: ChatCodec, model: str) -> None:
        self._request = request
        self._generations = choices.generations
        self._codec = codec
        self._frame = {
            "id": f"cmpl-{choices.generations[0].id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._told = [0] * len(choices.generations)
        self._chars = [0] * len(choices.generations)

    def whole(self, choices: Sequence[Sequence[ReplyPiece]]) -> bytes:
        told = [self._choice(at, _text(pieces), None, end=True) for at, pieces in enumerate(choices)]
        return wire.dump({**self._frame, "choices": told, "usage": openai_usage(self._generations, self._codec)})

    def first(self) -> bytes:
        return b""

    def chunk(self, choice: int, step: Step) -> bytes:
        return self._event([self._choice(choice, _text(step.pieces), step.upto)])

    def last(self) -> bytes:
        events = [self._event([self._choice(at, "", None, end=True)]) for at in range(len(self._generations))]
        if self._request.include_usage:
            usage = openai_usage(self._generations, self._codec)
            events.append(wire.event({**self._frame, "choices": [], "usage": usage}))
        return b"".join(events) + DONE

    def keep_alive(self) -> bytes:
        return self._event([self._choice(0, "", self._told[0])])

    def broken(self, error: ApiError) -> bytes:
        return wire.event(openai_error(error)[1])

    def _event(self, choices: list[Json]) -> bytes:
        return wire.event(
            {**self._frame, "choices": choices} | ({"usage": None} if self._request.include_usage else {})
        )

    def _choice(self, at: int, text: str, upto: int | None, *, end: bool = False) -> Json:
        """A choice with the text, and the log probabilities of tokens not told of yet, up to `upto` or to the end."""
        finish = self._generations[at].finish if end else None
        return {"index": at, "text": text, "logprobs": self._logprobs(at, text, upto), "finish_reason": finish}

    def _logprobs(self, at: int, text: str, upto: int | None) -> Json | None:
        if not self._request.logprobs:
            return None
        one, told = self._generations[at], slice(self._told[at], upto)
        self._told[at] = len(one.sampled_ids) if upto is None else upto
        tokens = [self._codec.decode((index,)) for index in one.sampled_ids[told]]
        starts = [self._chars[at]] * len(tokens)
        for index, token in enumerate(tokens[:-1]):
            starts[index + 1] = starts[index] + len(token)
        self._chars[at] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": one.logprobs[told],
            "top_logprobs": None,
            "text_offset": starts,
        }


def _text(pieces: Sequence[ReplyPiece]) -> str:
    return "".join(piece for piece in pieces if isinstance(piece, str))
