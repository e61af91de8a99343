"""What a program in a sandbox reaches: its own trajectory at the gateway, and the tools of its task. Nothing else.

http://127.0.0.1:8000/t/TRAJECTORY/v1/...   passed on to the gateway, byte by byte, but not to its reports
POST http://127.0.0.1:8000/tools/NAME       a call of the task's own tool; the body are its arguments in JSON,
                                            the answer is {"content": text, "failed": bool}
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote

import httptools

Tool = Callable[[str, str], Awaitable[tuple[str, bool]]]
"""(name, arguments in JSON) -> (what the model is told, whether the call worked)"""

_CHUNK = 2**16
_TOOLS = "/tools/"


class Refused(Exception):  # noqa: N818 - a state, not a fault
    """A request that leads elsewhere, or is none."""


class Requests:
    """Reads along with one connection's requests. What `feed` returns may pass; it raises Refused."""

    def __init__(self, allowed: str) -> None:
        self._allowed = allowed
        self._parser = httptools.HttpRequestParser(self)
        self._held = b""
        self._url = b""
        self._in_head = False
        self.tool: str | None = None  # the first request's
        self.body = bytearray()
        self.is_whole = False
        self._count = 0
        self._refused = ""

    def feed(self, data: bytes) -> bytes:
        self._held += data
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise Refused(f"no request of HTTP/1.1: {error}") from None
        if self._refused:
            raise Refused(self._refused)
        if self._in_head:
            return b""
        passing, self._held = self._held, b""
        return passing

    # --- called by the parser ------

    def on_message_begin(self) -> None:
        self._in_head, self._url = True, b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_headers_complete(self) -> None:
        path = unquote(httptools.parse_url(self._url).path.decode("ascii", "replace"))
        self._in_head = False
        self._count += 1
        if self._count == 1 and path.startswith(_TOOLS):
            self.tool = path.removeprefix(_TOOLS)
        elif self.tool is not None or not (path == self._allowed or path.startswith(f"{self._allowed}/v1")):
            self._refused = f"{path}: only {self._allowed}/v1 and {_TOOLS}NAME are to be had here"

    def on_body(self, body: bytes) -> None:
        if self.tool is not None:
            self.body += body

    def on_message_complete(self) -> None:
        self.is_whole = True


class Door:
    """Serves one sandbox's connections. `gateway`: host and port; `tool` answers calls of the task's tools."""

    def __init__(self, gateway: tuple[str, int], trajectory: str, tool: Tool) -> None:
        self._gateway = gateway
        self._allowed = f"/t/{trajectory}"
        self._tool = tool
        self._serving: set[asyncio.Task[None]] = set()

    def __call__(self, listener: socket.socket) -> AbstractAsyncContextManager[None]:
        return self._open(listener)

    @asynccontextmanager
    async def _open(self, listener: socket.socket) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, sock=listener)
        try:
            yield
        finally:
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            with suppress(OSError):  # either side is gone
                await self._serve(reader, writer)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests = Requests(self._allowed)
        try:
            first = await _first(reader, requests)
            if requests.tool is not None:
                await self._call(reader, writer, requests)
            elif first:
                await self._pass_on(first, reader, writer, requests)
        except Refused as error:
            _answer(writer, 403, {"error": {"message": str(error)}})
            await writer.drain()

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Requests) -> None:
        while not requests.is_whole:
            data = await reader.read(_CHUNK)
            if not data:
                return
            requests.feed(data)
        assert requests.tool is not None
        content, worked = await self._tool(requests.tool, requests.body.decode(errors="replace"))
        _answer(writer, 200, {"content": content, "failed": not worked})
        await writer.drain()

    async def _pass_on(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, requests: Requests
    ) -> None:
        """Until either side closes."""
        answers, asks = await asyncio.open_connection(*self._gateway)
        try:
            await until_one_ends(_requests(first, reader, asks, requests), _copy(answers, writer))
        finally:
            asks.close()


async def until_one_ends(*ways: Coroutine[Any, Any, None]) -> None:
    """Both ways of a connection: where one ends the others are cancelled, and what it raised is raised."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _first(reader: asyncio.StreamReader, requests: Requests) -> bytes:
    """Up to the end of the first request's head; b"" where none came."""
    while data := await reader.read(_CHUNK):
        if passing := requests.feed(data):
            return passing
    return b""


async def _requests(first: bytes, reader: asyncio.StreamReader, asks: asyncio.StreamWriter, requests: Requests) -> None:
    asks.write(first)
    while data := await reader.read(_CHUNK):
        asks.write(requests.feed(data))
        await asks.drain()


async def _copy(answers: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await answers.read(_CHUNK):
        writer.write(data)
        await writer.drain()


def _answer(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Forbidden'}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
