"""The HTTP edge on bare ASGI: whose request it is, its body, and how an answer leaves. No request objects."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from forge.gateway.errors import ApiError
from forge.types import Json

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = dict[bytes, bytes]
HeaderLines = list[tuple[bytes, bytes]]

#: response header naming the request's fields that the reply need not obey
UNENFORCED = b"x-forge-unenforced"

_JSON = b"application/json"
_KEYS = (b"x-api-key", b"x-goog-api-key")
KEY_HEADERS = (b"authorization", *_KEYS)


class HungUp(Exception):  # noqa: N818 - a state, not a fault
    """The client closed its connection before the request was read."""


def trajectory_of(scope: Scope, headers: Headers) -> str:
    """The path says it, else the X-Forge-Trajectory header, else the API key under any of its three names."""
    name: str = scope["path_params"].get("trajectory") or _header(headers, b"x-forge-trajectory")
    name = name or key_of(headers)
    if not name:
        message = "No trajectory: use the base URL /t/<trajectory>/v1, the header X-Forge-Trajectory, or an API key."
        raise ApiError(401, message, code="invalid_api_key")
    return name


def key_of(headers: Headers) -> str:
    """The API key, under whichever of its names the client sends it; "" without one."""
    scheme, _, token = _header(headers, b"authorization").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else ""
    for name in _KEYS:
        key = key or _header(headers, name)
    return key


def is_retry(headers: Headers) -> bool:
    """Marked by the client's SDK as a repetition of a request it got no good answer to."""
    count = headers.get(_RETRY_COUNT, b"0")
    return count.isdigit() and int(count) > 0


def may_retry(headers: Headers) -> bool:
    """Sent by an SDK that would mark a retry: worth keeping its generation for a moment after it hangs up."""
    return _RETRY_COUNT in headers


def is_sub_agent(headers: Headers) -> bool:
    """The client says that another of its agents began this conversation."""
    return any(name in headers for name in _SUB_AGENT)


_RETRY_COUNT = b"x-stainless-retry-count"
_SUB_AGENT = (b"x-parent-session-id", b"x-openai-subagent", b"x-codex-parent-thread-id", b"x-claude-code-agent-id")


def _header(headers: Headers, name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1").strip()


async def read_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """The whole body; ApiError 413 beyond `limit`, before holding more than that."""
    declared = headers.get(b"content-length", b"0")
    size = int(declared) if declared.isdigit() else 0
    parts: list[bytes] = []
    more = size <= limit
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        parts.append(message.get("body", b""))
        size = max(size, sum(map(len, parts)))
        more = message.get("more_body", False) and size <= limit
    if size > limit:
        raise ApiError(413, f"The body is larger than {limit} bytes.", code="request_too_large")
    return b"".join(parts)


async def until_hang_up(receive: Receive) -> None:
    """Returns when the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, body: bytes, headers: HeaderLines | None = None) -> None:
    await send_whole(send, status, body, _JSON, headers)


async def send_whole(
    send: Send, status: int, body: bytes, content_type: bytes, headers: HeaderLines | None = None
) -> None:
    lines = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def start_events(send: Send, headers: HeaderLines) -> None:
    """The head of a server-sent event stream."""
    lines = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), *headers]
    await send({"type": "http.response.start", "status": 200, "headers": lines})


async def send_events(send: Send, events: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": more})


def dump(data: Json) -> bytes:
    return json.dumps(data).encode()


def event(data: Json, name: str = "") -> bytes:
    """A server-sent event, named where the protocol names them."""
    text = dump(data)
    return b"event: %s\ndata: %s\n\n" % (name.encode(), text) if name else b"data: %s\n\n" % text
