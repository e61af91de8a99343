"""The stub engine of `forge bench gateway`: an HTTP server that streams chunks at a fixed rate, each with its time.

    POST /pace                 {"chunks": 40, "period_s": 0.05}: of the streams that begin from now on; 0: no pause
    POST /v1/chat/completions  a stream in OpenAI's form
    POST /generate             the same as token ids: `data: {"token_ids": [...]}`

A chunk's text is the time it was sent: microseconds of the monotonic clock, which all processes of a machine share,
modulo STAMPS. The first chunk comes at once.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from multiprocessing.connection import Connection

from forge.gateway.server import loop_factory

STAMPS = 1 << 31
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
_CHAT = b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"stub","choices":[{"index":0,"delta":'
_END = _CHAT + b'{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def stamp() -> int:
    return time.monotonic_ns() // 1000 % STAMPS


def chat_chunk() -> bytes:
    return _CHAT + b'{"role":"assistant","content":"%d "},"finish_reason":null}]}\n\n' % stamp()


def id_chunk() -> bytes:
    return b'data: {"token_ids":[%d]}\n\n' % stamp()


class Stub:
    """Answers every connection once."""

    def __init__(self) -> None:
        self.chunks, self.period_s = 1, 0.0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            path, body = await read_request(reader)
            if path == "/pace":
                pace = json.loads(body)
                self.chunks, self.period_s = pace["chunks"], pace["period_s"]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
            elif path == "/generate":
                await self._stream(writer, id_chunk, b'data: {"finish":"stop"}\n\n')
            else:
                await self._stream(writer, chat_chunk, _END)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client hung up
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, chunk: object, end: bytes) -> None:
        assert callable(chunk)
        chunks, period_s = self.chunks, self.period_s
        loop = asyncio.get_running_loop()
        due = loop.time()
        writer.write(_HEAD + chunk())
        for at in range(chunks - 1):
            due += period_s if at else period_s * random.random()  # streams that begin together do not keep step
            await writer.drain()
            await asyncio.sleep(max(0.0, due - loop.time()))
            writer.write(chunk())
        writer.write(end)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """(path, body)."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    lines = head.split("\r\n")
    sizes = [line.split(":")[1] for line in lines if line.lower().startswith("content-length:")]
    return lines[0].split(" ")[1], await reader.readexactly(int(sizes[0]) if sizes else 0)


def main(pipe: Connection) -> None:
    """Entry point of the process: tells its port, and serves until it is killed."""

    async def run() -> None:
        server = await asyncio.start_server(Stub().answer, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
