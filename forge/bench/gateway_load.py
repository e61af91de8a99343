"""The load of `forge bench gateway`: many conversations at once, each streamed, and the time of every chunk."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from forge.bench.gateway_stub import STAMPS, stamp
from forge.gateway.server import loop_factory
from forge.types import Json

_STAMP = re.compile(rb'"content": ?"(\d+) "')
STALL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`sessions` conversations of `turns` streams with `chunks` chunks each, begun over `spread_s`. `path` has the
    trajectory's name put in; `report_path` too, where sessions are ended by a report."""

    port: int
    path: str
    sessions: int
    turns: int
    chunks: int
    model: str = "stub"
    report_path: str = ""
    spread_s: float = 0.0


@dataclass(slots=True)
class Seen:
    """Milliseconds from a request to its first chunk, and from the sending of every later chunk to its arrival;
    seconds from the first request to the last chunk."""

    first_ms: list[float] = field(default_factory=list)
    chunk_ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


class _Stream(asyncio.Protocol):
    """One request and its streamed answer."""

    def __init__(self, seen: Seen, done: asyncio.Future[None]) -> None:
        self._seen, self._done = seen, done
        self._sent_s = time.monotonic()
        self._rest = b""
        self.head = b""
        self.stamps: list[bytes] = []

    def data_received(self, data: bytes) -> None:
        now_s, now = time.monotonic(), stamp()
        text = self._rest + data
        self.head = self.head or text[:64]
        end = 0
        for found in _STAMP.finditer(text):
            end = found.end()
            if self.stamps:
                self._seen.chunk_ms.append((now - int(found[1])) % STAMPS / 1000)
            else:
                self._seen.first_ms.append((now_s - self._sent_s) * 1000)
            self.stamps.append(found[1])
        self._rest = text[max(end, len(text) - 256) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None) if exc is None else self._done.set_exception(exc)


async def _post(port: int, path: str, body: Json, seen: Seen) -> _Stream:
    loop = asyncio.get_running_loop()
    text = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer sk-bench\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    )
    done: asyncio.Future[None] = loop.create_future()
    transport, stream = await loop.create_connection(lambda: _Stream(seen, done), "127.0.0.1", port)
    try:
        transport.write(head.encode() + text)
        async with asyncio.timeout(STALL_S):
            await done
    finally:
        transport.close()
    return stream


async def _session(load: Load, name: str, seen: Seen, begins_s: float) -> None:
    await asyncio.sleep(begins_s)
    messages = [{"role": "user", "content": f"session {name}"}]
    try:
        for turn in range(load.turns):
            body = {"model": load.model, "messages": messages, "stream": True}
            stream = await _post(load.port, load.path.format(name=name), body, seen)
            if b" 200 " not in stream.head or len(stream.stamps) != load.chunks:
                seen.errors.append(f"{len(stream.stamps)} of {load.chunks} chunks, {stream.head[:40]!r}")
            reply = "".join(f"{one.decode()} " for one in stream.stamps)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": f"go on {turn}"}]
        if load.report_path:
            report = await _post(load.port, load.report_path.format(name=name), {"reward": 1.0, "ended": True}, Seen())
            if b" 200 " not in report.head:
                seen.errors.append(f"report: {report.head[:40]!r}")
    except (OSError, TimeoutError) as error:
        seen.errors.append(f"{type(error).__name__}: {error}")


_names = itertools.count()


async def _all(load: Load) -> Seen:
    seen, began = Seen(), time.monotonic()
    step_s = load.spread_s / load.sessions
    await asyncio.gather(*(_session(load, f"s{next(_names)}", seen, at * step_s) for at in range(load.sessions)))
    seen.seconds = time.monotonic() - began
    return seen


async def _pace(port: int, chunks: int, period_s: float) -> None:
    await _post(port, "/pace", {"chunks": chunks, "period_s": period_s}, Seen())


def main(pipe: Connection, stub_port: int) -> None:
    """Entry point of the process: for every (load, seconds between chunks) it gets, it sends what was seen."""
    runs: Callable[..., Any] = asyncio.Runner(loop_factory=loop_factory()).run
    while True:
        load, period_s = pipe.recv()
        runs(_pace(stub_port, load.chunks, period_s))
        pipe.send(runs(_all(load)))
