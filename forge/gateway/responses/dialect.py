"""OpenAI's Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from forge.gateway import wire
from forge.gateway.chat import ChatCodec
from forge.gateway.choices import Choices
from forge.gateway.errors import ApiError, openai_error
from forge.gateway.generation import Step
from forge.gateway.reading import ReplyPiece
from forge.gateway.reasoning import reasoning_tokens
from forge.gateway.responses.output import Event, OutputItems
from forge.gateway.responses.request import ResponsesRequest, parse_responses_request
from forge.gateway.responses.store import ResponseStore
from forge.types import Json


class ResponsesDialect:
    """POST /v1/responses. Remembers the responses it gave, for requests that go on from one."""

    name = "responses"

    def __init__(self, codec: ChatCodec, model: str) -> None:
        self._codec = codec
        self._model = model
        self._store = ResponseStore()

    def parse(self, data: Json, trajectory: str) -> ResponsesRequest:
        return parse_responses_request(data, trajectory, self._store)

    def reply(self, request: ResponsesRequest, choices: Choices) -> ResponsesReply:
        return ResponsesReply(request, choices, self._codec, request.model or self._model, self._store)

    def counted(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, error: ApiError) -> tuple[int, Json]:
        return openai_error(error)


class ResponsesReply:
    def __init__(
        self, request: ResponsesRequest, choices: Choices, codec: ChatCodec, model: str, store: ResponseStore
    ) -> None:
        (self._generation,) = choices.generations
        self._request = request
        self._codec = codec
        self._store = store
        self._output = OutputItems(self._generation, request.origins)
        self._number = 0
        self._id = f"resp_{self._generation.id}"
        fixed = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            **request.repeated,
        }
        # Tools make it long, and every stream tells it three times: written once, the rest is put behind it.
        self._fixed = json.dumps(fixed)[:-1]

    def whole(self, choices: Sequence[Sequence[ReplyPiece]]) -> bytes:
        for piece in choices[0]:
            for _ in self._output.add(piece):
                pass
        for _ in self._output.end():
            pass
        return self._response(self._finish()).encode()

    def first(self) -> bytes:
        return self._lifecycle("created", _UNDER_WAY) + self.keep_alive()

    def chunk(self, _choice: int, step: Step) -> bytes:
        return b"".join(self._events(self._output.add(piece)) for piece in step.pieces)

    def last(self) -> bytes:
        events = self._events(self._output.end())
        rest = self._finish()
        return events + self._lifecycle(str(rest["status"]), rest)

    def keep_alive(self) -> bytes:
        return self._lifecycle("in_progress", _UNDER_WAY)

    def broken(self, error: ApiError) -> bytes:
        told = {"code": _CODES.get(error.status, error.code or "server_error"), "message": error.message}
        return self._lifecycle("failed", {**_UNDER_WAY, "status": "failed", "error": told})

    def _finish(self) -> Json:
        """What a complete response says of itself; it is remembered."""
        items = self._output.items
        if self._request.store:
            messages = [*self._request.history, self._generation.message]
            self._store.add(self._request.trajectory, self._id, messages, items)
        cut = self._generation.finish == "length"
        return {
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": self._usage(),
        }

    def _usage(self) -> Json:
        one = self._generation
        prompt, sampled = len(one.job.prompt_ids), len(one.sampled_ids)
        thought = reasoning_tokens(self._codec.decode, one.sampled_ids) if one.job.reader.reasoned else 0
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},  # what engines reuse is not told
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + sampled,
        }

    def _response(self, rest: Json) -> str:
        return f"{self._fixed}, {json.dumps(rest)[1:]}"

    def _lifecycle(self, kind: str, rest: Json) -> bytes:
        name = f"response.{kind}"
        head = json.dumps({"type": name, "sequence_number": self._next()})[:-1]
        return f'event: {name}\ndata: {head}, "response": {self._response(rest)}}}\n\n'.encode()

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(
            wire.event({"type": f"response.{kind}", "sequence_number": self._next(), **told}, f"response.{kind}")
            for kind, told in events
        )

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


_UNDER_WAY: Json = {
    "status": "in_progress",
    "error": None,
    "incomplete_details": None,
    "output": [],
    "usage": None,
}
#: of a response that failed after its head was sent: agents wait, try again or give up by them
_CODES = {429: "rate_limit_exceeded", 500: "server_error", 503: "server_error"}
