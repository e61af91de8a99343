"""A proxy before a gateway that cuts one answer off in the middle: what a broken network does to an agent."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from forge.blackbox.door import until_one_ends

#: bytes of an answer's body that pass before it is cut
_PASS = 300


class Cutter:
    """Passes connections on to `gateway`. The first answer to a POST is cut, if `cuts` is 1."""

    def __init__(self, gateway: tuple[str, int], cuts: int) -> None:
        self.cuts = cuts
        self._gateway = gateway
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Its URL."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asks = await asyncio.open_connection(*self._gateway)
        asked = _Asked()
        try:
            await until_one_ends(self._ask(reader, asks, asked), self._answer(answers, writer, asked))
        finally:
            asks.close()
            writer.close()

    async def _ask(self, reader: asyncio.StreamReader, asks: asyncio.StreamWriter, asked: _Asked) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                asked.is_post = asked.is_post or data.startswith(b"POST ")
                asks.write(data)
                await asks.drain()

    async def _answer(self, answers: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: _Asked) -> None:
        passed = b""
        with suppress(OSError):
            while data := await answers.read(128):
                passed += data if asked.is_post and self.cuts else b""
                head = passed.find(b"\r\n\r\n")
                if self.cuts and head >= 0 and passed.startswith(b"HTTP/1.1 200") and len(passed) - head > _PASS:
                    self.cuts -= 1
                    _reset(writer)
                    return
                writer.write(data)
                await writer.drain()


class _Asked:
    is_post = False


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close so that the other side is told of a broken connection, and not of an answer's end."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    writer.transport.abort()
