"""A child process by its pidfd: ended and waited for exactly, under any event loop, whoever else waits for children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

#: where programs are looked for; a child gets this of our environment and nothing more, as it can be read inside
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
_CHUNK = 2**16


class Child:
    """Its standard output, errors among it, comes through `output`, a pipe that is the caller's to close."""

    def __init__(self, arguments: Sequence[str], *, stdin: int, keep: tuple[int, ...] = ()) -> None:
        """`stdin`, and the descriptors to `keep` in the child, stay the caller's to close. Raises OSError."""
        self.output, there = os.pipe()
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=stdin,
                stdout=there,
                stderr=there,
                pass_fds=keep,
                env={"PATH": PATH},
                start_new_session=True,
            )
        except OSError:
            os.close(self.output)
            raise
        finally:
            os.close(there)
        self.number = self._process.pid
        self._handle = os.pidfd_open(self.number)

    async def ended(self) -> int:
        """Wait for its end. The exit code, negative for a signal's number."""
        await readable(self._handle)
        return self._process.wait()

    async def end(self) -> int:
        """Kill it where it still runs, and wait. Once."""
        with suppress(ProcessLookupError):  # it was waited for
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        code = await self.ended()
        os.close(self._handle)
        return code


async def readable(descriptor: int) -> None:
    """Until there is something to read from it, or, of a pidfd, until the process has ended. One waits at a time."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def read(pipe: int) -> bytes:
    """The next of what is written to a pipe; b"" once nobody is left who could."""
    await readable(pipe)
    return os.read(pipe, _CHUNK)


async def read_all(pipe: int) -> bytes:
    data = b""
    while more := await read(pipe):
        data += more
    return data


async def end_process(handle: int) -> None:
    """Kill the process of a pidfd and wait until it has ended, whosever child it is; closes the pidfd."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    await readable(handle)
    os.close(handle)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
