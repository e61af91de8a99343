"""The gateway's HTTP application: which path speaks which protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from forge.gateway import models, wire
from forge.gateway.access import HEALTH, TokenGate
from forge.gateway.anthropic.dialect import MessagesDialect
from forge.gateway.backend import Backend
from forge.gateway.chat import ChatCodec
from forge.gateway.chat_reply import ChatDialect
from forge.gateway.completions import CompletionsDialect
from forge.gateway.delivery import CountEndpoint, GenerateEndpoint
from forge.gateway.errors import ApiError
from forge.gateway.gateway import Gateway
from forge.gateway.gemini.dialect import GeminiDialect
from forge.gateway.protocol import AnyDialect
from forge.gateway.report_endpoint import ReportEndpoint
from forge.gateway.request import Constrain
from forge.gateway.responses.dialect import ResponsesDialect
from forge.gateway.service import Health, Metrics
from forge.gateway.watch import Watch
from forge.types import Json


def create_app(
    backend: Backend,
    chat: ChatCodec,
    *,
    pin_sampling: bool = False,
    constrain: Constrain | None = None,
    retry_grace_s: float = 2.0,
    keep_alive_s: float = 10.0,
    max_body_bytes: int = 32 * 1024 * 1024,
    tokens: Sequence[str] = (),
    log: Callable[[Json], None] | None = None,
) -> Starlette:
    """An ASGI app serving `backend` in every protocol; its `Gateway` is `app.state.gateway`.

    `retry_grace_s`: how long a generation outlives a client that hung up but may retry (its SDK marks retries).
    `keep_alive_s`: a stream is never silent for longer. `tokens` for access: whoever shows none is refused; without any
    everybody is served. `log` gets a row for every request (forge.gateway.watch).
    """
    gateway = Gateway(
        backend,
        chat,
        pin_sampling=pin_sampling,
        retry_grace_s=retry_grace_s,
        constrain=constrain,
        watch=Watch(log),
    )

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        gateway.close()

    def generate(dialect: AnyDialect) -> ASGIApp:
        return GenerateEndpoint(gateway, dialect, max_body_bytes=max_body_bytes, keep_alive_s=keep_alive_s)

    def count(dialect: AnyDialect) -> ASGIApp:
        return CountEndpoint(gateway, dialect, max_body_bytes=max_body_bytes)

    model = backend.model
    responses, messages = ResponsesDialect(chat, model), MessagesDialect(model)
    gemini = GeminiDialect(chat, model, stream=False)
    posts: dict[str, ASGIApp] = {
        "/v1/chat/completions": generate(ChatDialect(chat, model)),
        "/v1/completions": generate(CompletionsDialect(chat, model)),
        "/v1/responses": generate(responses),
        "/v1/responses/input_tokens": count(responses),
        "/v1/messages": generate(messages),
        "/v1/messages/count_tokens": count(messages),
        "/v1beta/models/{model:path}:generateContent": generate(gemini),
        "/v1beta/models/{model:path}:streamGenerateContent": generate(GeminiDialect(chat, model, stream=True)),
        "/v1beta/models/{model:path}:countTokens": count(gemini),
        "/report": ReportEndpoint(gateway, max_body_bytes=max_body_bytes),
    }
    gets: dict[str, ASGIApp] = {
        "/v1/models": models.V1Models(backend),
        "/v1/models/{model:path}": models.V1Models(backend),
        "/v1beta/models": models.GeminiModels(backend),
        "/v1beta/models/{model:path}": models.GeminiModels(backend),
        "": models.Greeting(backend),
        "/": models.Greeting(backend),
    }
    routes = [
        Route(prefix + path or "/", endpoint, methods=[method])
        for prefix in ("/t/{trajectory}", "")
        for method, table in (("POST", posts), ("GET", gets))
        for path, endpoint in table.items()
    ]
    routes += [Route(HEALTH, Health(gateway)), Route("/metrics", Metrics(gateway))]
    guards = [Middleware(TokenGate, tokens=tokens)] if tokens else []
    app = Starlette(routes=routes, lifespan=lifespan, middleware=guards, exception_handlers={HTTPException: _no_route})
    app.state.gateway = gateway
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405, in the shape of the protocol the path or its headers look like."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = "No such method here." if status == 405 else "No such path: try /v1/chat/completions."
    told = ApiError(status, message, code="unknown_url")
    status, body = models.error_shape(request.url.path, dict(request.scope["headers"]))(told)
    return Response(wire.dump(body), status, media_type="application/json")
