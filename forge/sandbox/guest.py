"""A guest's way into a sandbox: its folders, its home, and a door in a network that leads nowhere else.

The sandbox has a network of its own with nothing but a loopback. A socket that listens there is opened inside, before
the guest begins, and handed out; whoever holds it accepts connections from inside, and nobody inside can open it anew.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from forge.sandbox.base import DOOR, HOME, Guest
from forge.sandbox.child import readable

_MIB = 2**20
#: run-times ask who they are
_PASSWD = f"agent:x:1000:1000:agent:{HOME}:/bin/bash\n".encode()
_OPENS = """\
import os, socket, sys
out = socket.socket(fileno=int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", int(sys.argv[2])), backlog=64)
socket.send_fds(out, [b"."], [listener.fileno()])
out.close()
listener.close()
os.execvp(sys.argv[3], sys.argv[3:])
"""


@dataclass(slots=True)
class Entrance:
    """Of one run. `opens` is what the command begins with; descriptors to `keep` are open in it; `files` by their
    paths."""

    guest: Guest | None = None
    inside: socket.socket | None = None
    outside: socket.socket | None = None
    files: dict[str, int] = field(default_factory=dict)

    @property
    def keep(self) -> tuple[int, ...]:
        return (*self.files.values(), *([self.inside.fileno()] if self.inside else []))

    @property
    def opens(self) -> list[str]:
        return ["python3", "-I", "-c", _OPENS, f"{self.inside.fileno()}", f"{DOOR}"] if self.inside else []

    def served(self) -> AbstractAsyncContextManager[None]:
        """While the command runs: its door."""
        return nullcontext() if self.outside is None else self._served(self.outside)

    @asynccontextmanager
    async def _served(self, outside: socket.socket) -> AsyncIterator[None]:
        assert self.inside is not None
        self.inside.close()  # so that the other end says when nobody is left inside
        serving = asyncio.ensure_future(self._serve(outside))
        try:
            yield
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving

    async def _serve(self, outside: socket.socket) -> None:
        assert self.guest is not None
        assert self.guest.door is not None
        await readable(outside.fileno())
        _, descriptors, _, _ = socket.recv_fds(outside, 1, 1)
        if descriptors:  # else it ended before
            async with self.guest.door(socket.socket(fileno=descriptors[0])):
                await asyncio.Event().wait()


@contextmanager
def opened(guest: Guest | None) -> Iterator[Entrance]:
    """What a run with this guest begins with; closed after it."""
    entrance = Entrance(guest)
    try:
        if guest and guest.door:
            entrance.outside, entrance.inside = socket.socketpair()
        for path, data in _files(guest).items() if guest else ():
            entrance.files[path] = os.memfd_create(path)
            _fill(entrance.files[path], data)
        yield entrance
    finally:
        for descriptor in entrance.files.values():
            os.close(descriptor)
        for end in (entrance.inside, entrance.outside):
            if end is not None:
                end.close()


def bound(guest: Guest, entrance: Entrance) -> list[str]:
    """Arguments of bubblewrap."""
    arguments = ["--size", f"{guest.home_mib * _MIB}", "--tmpfs", HOME]
    for path, descriptor in entrance.files.items():
        arguments += ["--file", f"{descriptor}", path]
    for folder in guest.folders:
        arguments += ["--ro-bind", str(folder), str(folder)]
    return arguments


def _files(guest: Guest) -> dict[str, bytes]:
    """By their paths inside."""
    return {"/etc/passwd": _PASSWD, **{f"{HOME}/{path}": data for path, data in guest.home.items()}}


def _fill(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
