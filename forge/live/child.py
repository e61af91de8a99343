"""Child processes and the message pipes to them.

A message is a tuple whose first element names its kind. A child that loses its parent ends at the next read (end
of file), so killing the parent with SIGKILL leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[Any, ...]

#: Longer than a trainer step of a small model, so that no temporary checkpoint is left behind.
LEAVE_S = 3.0

# Two contending OpenMP pools were measured ten times slower than one thread each.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class Child:
    """One spawned process. `on_message` and `on_exit` are called in the owner's event loop."""

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        for key, value in ONE_THREAD.items():
            os.environ.setdefault(key, value)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.name = name
        self._pipe = ours
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process = context.Process(target=_main, args=(theirs, target, args), name=f"forge-{name}", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def watch(self, on_message: Callable[[Message], None], on_exit: Callable[[], None]) -> None:
        def readable() -> None:
            try:
                while self._pipe.poll():
                    on_message(self._pipe.recv())
            except (EOFError, ConnectionResetError):
                self.unwatch()
                on_exit()

        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), readable)

    def unwatch(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._pipe.fileno())
            self._loop = None

    def send(self, *message: Any) -> None:
        """Messages to a dead child are dropped: its exit is reported once, by `on_exit`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, OSError):
            self._pipe.send(message)

    def stop(self) -> None:
        """End the process: it leaves by itself once its pipe is closed, or is killed if it does not.

        Everything it owed the world is durable elsewhere or asked for again.
        """
        self.unwatch()
        self._pipe.close()
        self._process.join(LEAVE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _main(pipe: Connection, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole process group; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        target(pipe, *args)
