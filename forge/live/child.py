"""Child processes and the message pipes to them.

A message is a tuple whose first element names its kind. A child that loses its parent is killed with it (Linux), or
ends at its next read (elsewhere), so killing the parent with SIGKILL leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from forge.processes import belong_to
from forge.types import ForgeError

Message = tuple[Any, ...]

#: Longer than a trainer step of a small model, so that no temporary checkpoint is left behind.
LEAVE_S = 3.0

# Two contending OpenMP pools were measured ten times slower than one thread each.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

#: What a pipe raises once the other side is gone, between two messages or within one.
GONE = (EOFError, OSError)


class ChildError(RuntimeError):
    """A child process failed by a fault of ours; the message is its traceback."""


class Child:
    """One spawned process. `on_message` and `on_exit` are called in the owner's event loop.

    A thread reads and another writes, both blocking: an event loop may switch the descriptors it watches to
    non-blocking, and then a full pipe loses or tears messages.
    """

    def __init__(self, name: str, target: Callable[..., None], *args: Any) -> None:
        for key, value in ONE_THREAD.items():
            os.environ.setdefault(key, value)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.name = name
        self._watched = False
        self._outbox: SimpleQueue[Message | None] = SimpleQueue()
        self._process = context.Process(
            target=_main, args=(theirs, target, args, os.getpid()), name=f"forge-{name}", daemon=True
        )
        self._process.start()
        theirs.close()
        self._threads = [threading.Thread(target=self._write, name=f"to-{name}", daemon=True)]
        self._threads[0].start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def watch(self, on_message: Callable[[Message], None], on_exit: Callable[[], None]) -> None:
        """Deliver messages to the running event loop from now on; once per child."""
        self._watched = True
        arguments = (asyncio.get_running_loop(), on_message, on_exit)
        self._threads.append(threading.Thread(target=self._read, args=arguments, name=f"from-{self.name}", daemon=True))
        self._threads[-1].start()

    def send(self, *message: Any) -> None:
        """Never blocks. Messages to a dead child are dropped: its exit is reported once, by `on_exit`."""
        self._outbox.put(message)

    def stop(self) -> None:
        """End the process: it leaves by itself once its pipe is shut, or is killed if it does not.

        Everything it owed the world is durable elsewhere or asked for again.
        """
        self._watched = False
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as ends:
            ends.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)
        self._process.join(LEAVE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        for thread in self._threads:
            thread.join()
        self._pipe.close()

    def _write(self) -> None:
        with contextlib.suppress(*GONE):
            while (message := self._outbox.get()) is not None:
                self._pipe.send(message)

    def _read(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Message], None],
        on_exit: Callable[[], None],
    ) -> None:
        try:
            with contextlib.suppress(*GONE):
                while True:
                    message = self._pipe.recv()
                    loop.call_soon_threadsafe(self._deliver, on_message, message)
        finally:  # also where a message could not be read: the child is of no more use
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._deliver, on_exit)

    def _deliver(self, callback: Callable[..., None], *args: Any) -> None:
        if self._watched:
            callback(*args)


def _main(pipe: Connection, target: Callable[..., None], args: tuple[Any, ...], parent: int) -> None:
    belong_to(parent)
    try:
        target(pipe, *args)
    except GONE:
        pass
    except Exception as error:
        with contextlib.suppress(*GONE):
            is_user_error = isinstance(error, ForgeError)
            pipe.send(("failed", str(error) if is_user_error else traceback.format_exc(), is_user_error))


def failure_of(message: Message) -> Exception:
    """What a child's ("failed", text, is_user_error) means here. The text of a fault of ours is its traceback."""
    _, text, is_user_error = message
    return ForgeError(text) if is_user_error else ChildError(text)
