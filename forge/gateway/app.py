"""The gateway's HTTP application: routes, and how an answer reaches the client, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from forge.gateway import wire
from forge.gateway.backend import Backend
from forge.gateway.chat import ChatCodec
from forge.gateway.chat_reply import ChatReply, error_event
from forge.gateway.chat_request import ChatRequest, parse_chat_request
from forge.gateway.errors import ApiError, from_backend
from forge.gateway.gateway import Gateway
from forge.gateway.generation import Generation
from forge.gateway.retries import Ticket
from forge.gateway.wire import Receive, Scope, Send

logger = logging.getLogger(__name__)


def create_app(
    backend: Backend,
    chat: ChatCodec,
    *,
    pin_sampling: bool = False,
    retry_grace_s: float = 2.0,
    max_body_bytes: int = 32 * 1024 * 1024,
) -> Starlette:
    """An ASGI app serving Chat Completions for `backend`; its `Gateway` is `app.state.gateway`.

    `retry_grace_s`: how long a generation outlives a client that hung up but may retry (its SDK marks retries).
    """
    gateway = Gateway(backend, chat, pin_sampling=pin_sampling, retry_grace_s=retry_grace_s)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        gateway.close()

    completions = ChatEndpoint(gateway, max_body_bytes)
    models = ModelsEndpoint(backend)
    routes = [
        Route(prefix + path, endpoint, methods=[method])
        for prefix in ("/t/{trajectory}", "")
        for path, endpoint, method in (
            ("/v1/chat/completions", completions, "POST"),
            ("/v1/models", models, "GET"),
        )
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _no_route})
    app.state.gateway = gateway
    return app


async def _no_route(_request: Request, error: Exception) -> Response:
    """404 and 405 in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = "No such method here." if status == 405 else "No such path: try /v1/chat/completions."
    body = ApiError(status, message, code="unknown_url").body()
    return Response(body, status, media_type="application/json")


class ModelsEndpoint:
    """The one model being served, under the name the backend gives it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        model = {"id": self._backend.model, "object": "model", "created": 0, "owned_by": "forge"}
        await wire.send_json(send, 200, json.dumps({"object": "list", "data": [model]}).encode())


class ChatEndpoint:
    """POST chat/completions."""

    def __init__(self, gateway: Gateway, max_body_bytes: int) -> None:
        self._gateway = gateway
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers: wire.Headers = dict(scope["headers"])
        try:
            body = await wire.read_body(headers, receive, self._max_body_bytes)
            trajectory = wire.trajectory_of(scope, headers)
            defaults = self._gateway.backend.open(trajectory)
            request = parse_chat_request(body)
            ticket = self._gateway.join(trajectory, body) if wire.is_retry(headers) else None
            if ticket is None:
                ticket = self._gateway.start(trajectory, body, request, defaults)
            delivery = _Delivery(self._gateway, ticket, request, send)
            await delivery.run(receive, may_retry=wire.may_retry(headers))
        except wire.HungUp:
            return
        except Exception as error:
            await wire.send_error(send, as_api_error(error))


def as_api_error(error: Exception) -> ApiError:
    """The client's view of any failure; our own faults are logged here and shown without details."""
    answer = from_backend(error)
    if answer is None:
        logger.error("gateway: a request failed", exc_info=error)
        answer = ApiError(500, "The server had an error while processing your request.", code="internal_error")
    return answer


class _Delivery:
    """One client being answered from one generation."""

    def __init__(self, gateway: Gateway, ticket: Ticket[Generation], request: ChatRequest, send: Send) -> None:
        self._gateway = gateway
        self._ticket = ticket
        self._generation = ticket.flight
        self._request = request
        self._send = send
        self._reply = ChatReply(request, ticket.flight, gateway.codec, gateway.backend.model)
        self._delivered = False

    async def run(self, receive: Receive, *, may_retry: bool) -> None:
        """Answer, unless the client hangs up first. Raises what went wrong before the head was sent."""
        gone = asyncio.ensure_future(wire.until_hang_up(receive))
        writing = asyncio.ensure_future(self._stream(gone) if self._request.stream else self._whole(gone))
        try:
            await asyncio.wait((gone, writing), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            gone.cancel()
            writing.cancel()
            self._gateway.leave(self._ticket, delivered=self._delivered, may_retry=may_retry)

    async def _whole(self, gone: asyncio.Future[None]) -> None:
        steps = [step async for step in self._generation.steps()]
        self._generation.settle()
        delivered = not gone.done()
        await wire.send_json(self._send, 200, self._reply.whole(steps))
        self._delivered = delivered

    async def _stream(self, gone: asyncio.Future[None]) -> None:
        started = False
        try:
            async for step in self._generation.steps():
                if not started:
                    await wire.start_events(self._send)
                    await wire.send_events(self._send, self._reply.first_chunk())
                    started = True
                if step.pieces:
                    await wire.send_events(self._send, b"".join(self._reply.chunks(step)))
            self._generation.settle()
            delivered = not gone.done()
            await wire.send_events(self._send, b"".join(self._reply.last_chunks()), more=False)
            self._delivered = delivered
        except Exception as error:
            if not started:
                raise
            # The status has gone out as 200: the stream itself must say that it is broken, and not end in [DONE].
            await wire.send_events(self._send, error_event(as_api_error(error).body()), more=False)
