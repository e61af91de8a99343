"""The one model being served, under the name the backend gives it, as each protocol lists models."""

from __future__ import annotations

from collections.abc import Callable

from forge.gateway import wire
from forge.gateway.anthropic.errors import anthropic_error
from forge.gateway.backend import Backend
from forge.gateway.errors import ApiError, openai_error
from forge.gateway.gemini.errors import gemini_error
from forge.gateway.wire import Headers, Receive, Scope, Send
from forge.types import Json

ErrorShape = Callable[[ApiError], tuple[int, Json]]
_ANTHROPIC = b"anthropic-version"


def error_shape(path: str, headers: Headers) -> ErrorShape:
    """How to tell an error to whoever asks for this path."""
    if "/v1beta" in path:
        return gemini_error
    if _ANTHROPIC in headers or "/v1/messages" in path:
        return anthropic_error
    return openai_error


class V1Models:
    """GET /v1/models and /v1/models/{model}: OpenAI's shape, or Anthropic's to clients that send its version header."""

    def __init__(self, backend: Backend) -> None:
        self._name = backend.model

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        headers: Headers = dict(scope["headers"])
        anthropic = _ANTHROPIC in headers
        shown = _anthropic_model(self._name) if anthropic else _openai_model(self._name)
        asked = scope["path_params"].get("model")
        if asked is None:
            only = {"has_more": False, "first_id": self._name, "last_id": self._name}
            await _send(send, {"data": [shown], **(only if anthropic else {"object": "list"})})
        elif asked == self._name:
            await _send(send, shown)
        else:
            await _send_unknown(send, self._name, asked, error_shape(scope["path"], headers))


class GeminiModels:
    """GET /v1beta/models and /v1beta/models/{model}."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        name, limit = self._backend.model, self._backend.max_context
        shown = {
            "name": f"models/{name}",
            "displayName": name,
            "inputTokenLimit": limit,
            "outputTokenLimit": limit,
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }
        asked = scope["path_params"].get("model")
        if asked in (None, name):
            await _send(send, shown if asked else {"models": [shown]})
        else:
            await _send_unknown(send, name, asked, gemini_error)


class Greeting:
    """GET or HEAD of a base URL, which some clients try before anything else."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await _send(send, {"forge": "gateway", "model": self._backend.model})


def _openai_model(name: str) -> Json:
    return {"id": name, "object": "model", "created": 0, "owned_by": "forge"}


def _anthropic_model(name: str) -> Json:
    return {"id": name, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def _send(send: Send, body: Json) -> None:
    await wire.send_json(send, 200, wire.dump(body))


async def _send_unknown(send: Send, name: str, asked: str, shape: ErrorShape) -> None:
    message = f"The model {asked!r} does not exist here: {name!r} is served, and answers to any name."
    status, body = shape(ApiError(404, message, param="model", code="model_not_found"))
    await wire.send_json(send, status, wire.dump(body))
