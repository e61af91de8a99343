"""Tokens for access: with them a gateway answers nobody who has none, but for its health."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp

from forge.gateway import models, wire
from forge.gateway.errors import ApiError
from forge.gateway.wire import Headers, Receive, Scope, Send
from forge.types import ForgeError

#: where probes look; it tells nothing but whether the engine works
HEALTH = "/health"
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class TokenGate:
    """Lets through who shows one of `tokens` as an API key, under any of its three names.

    The key goes no further, so it names no trajectory: the path or the header X-Forge-Trajectory does.
    """

    def __init__(self, app: ASGIApp, tokens: Sequence[str]) -> None:
        self._app = app
        self._tokens = [token.encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != HEALTH:
            headers: Headers = dict(scope["headers"])
            shown = wire.key_of(headers).encode()
            # Every one is compared, so that the time says nothing.
            if not sum(hmac.compare_digest(shown, token) for token in self._tokens):
                error = ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
                status, body = models.error_shape(scope["path"], headers)(error)
                await wire.send_json(send, status, wire.dump(body))
                return
            scope["headers"] = [(name, value) for name, value in scope["headers"] if name not in wire.KEY_HEADERS]
        await self._app(scope, receive, send)


def access_tokens(host: str, file: str | Path | None, host_key: str, file_key: str) -> tuple[str, ...]:
    """The tokens of a gateway bound to `host`: a file has one a line; empty lines and those that begin with # say
    nothing. One that others can reach needs some. The keys are what the two are called. Raises ForgeError."""
    if file is None and host in LOOPBACK:
        return ()
    if file is None:
        raise ForgeError(
            f"{host_key} = {host}: whoever reaches this port could generate and report; name a file of access tokens "
            f"({file_key}), or bind to 127.0.0.1"
        )
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ForgeError(f"{file_key} = {file}: cannot be read ({error}); name a text file, a token a line") from None
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ForgeError(f"{file_key} = {file}: holds no token; write at least one, each on a line of its own")
    return tokens
