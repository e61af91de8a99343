"""Serving an app on loopback inside an event loop that is already running."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib.util
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from forge.types import ForgeError

#: Longer than any client pool keeps an idle connection (httpx: 5 s): the client closes first, so no request is
#: ever sent into a connection the server is just closing.
KEEP_ALIVE_S = 120


class _Server(uvicorn.Server):
    """Leaves signals to the program it lives in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RunningServer:
    """A server accepting connections. `stop` lets answers in progress finish for a while, then cuts them off."""

    def __init__(self, server: uvicorn.Server, host: str, port: int, task: asyncio.Task[None]) -> None:
        self._server = server
        self._task = task
        self.host = host
        self.port = port

    @property
    def url(self) -> str:
        """`http://host:port`, to which clients add /v1 or /t/<trajectory>/v1."""
        return f"http://{self.host}:{self.port}"

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._task


async def serve(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 0, graceful_s: float = 2.0) -> RunningServer:
    """Start serving; port 0 takes any free one. ForgeError if the port cannot be had."""
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        http="auto",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(graceful_s)),
    )
    server = _Server(config)
    task = asyncio.create_task(_run(server, listener))
    while not server.started and not task.done():
        await asyncio.sleep(0.005)
    if task.done():
        task.result()
    return RunningServer(server, host, listener.getsockname()[1], task)


async def _run(server: uvicorn.Server, listener: socket.socket) -> None:
    """Uvicorn ends the whole program when an app's start-up fails; here that is an error like any other."""
    try:
        await server.serve(sockets=[listener])
    except SystemExit as error:
        listener.close()
        raise ForgeError("gateway: the app failed to start; its log says why") from error


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        why = "is already in use" if taken else f"cannot be used: {error.strerror or error}"
        raise ForgeError(f"port {port} on {host} {why}; name another port, or 0 for any free one") from error
    listener.setblocking(False)
    return listener


def calm_collector() -> None:
    """For a process that streams, once it is up: Python's collector need not look through all that start-up made, nor
    as often. A full collection holds every stream up for tens of milliseconds; here it made the 99th percentile."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's loop where it is installed, for `asyncio.Runner(loop_factory=...)`."""
    if importlib.util.find_spec("uvloop"):
        import uvloop

        return uvloop.new_event_loop
    return asyncio.new_event_loop
