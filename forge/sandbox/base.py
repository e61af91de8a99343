"""The `Sandbox` protocol: commands and files of one agent, contained, and gone when it is closed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

#: where commands find their workspace
WORKSPACE = "/workspace"
#: where a guest finds its home, and the port of its own loopback that leads to its door
HOME, DOOR = "/home/agent", 8000
#: what a command may write, as a multiple of what is kept of it
FLOOD = 16

Met = Literal["time", "cpu", "memory", "processes", "output", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one command and everything it starts. What a machine does not enforce is said by `Sandbox.missing`."""

    seconds: float = 30.0  # on the clock
    cpu_seconds: int = 30  # of each process
    cores: float = 1.0  # of all processes together
    memory_mib: int = 512  # of all processes together, beside the files; without cgroups of each process's addresses
    processes: int = 64
    output_kib: int = 64  # kept; who writes 16 times as much is ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a command ended.

    `exit_code` is null where Forge ended it. `output` is what it wrote, errors among it, cut at the limit (`cut`).
    `met` are the limits it ran into, those that Forge ended it at first: "time" and "output" always; "cpu" by the
    signal it died of; "disk" where no room was left when it ended; "memory" and "processes" where cgroups count them:
    elsewhere an allocation or a fork fails inside, and only the output tells.
    """

    exit_code: int | None
    output: str
    cut: bool
    seconds: float
    met: tuple[Met, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """What a program needs that is no command of an agent but an agent itself.

    `folders` of this machine are there at their own paths, read-only. `home` are the files that `HOME` begins with, by
    their paths in it; it holds `home_mib` at most and is gone with the program. `door` is handed the socket that
    listens at `DOOR`, inside, and serves it; no other connection leads out.
    """

    folders: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    home: Mapping[str, bytes] = field(default_factory=dict)
    home_mib: int = 256
    door: Callable[[socket.socket], AbstractAsyncContextManager[None]] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a workspace by its path within it; `size` in bytes, null for a link or anything else."""

    path: str
    size: int | None


class WorkspaceError(Exception):
    """A path that leaves the workspace or is no file, or no room: whoever named it is told, nothing else ends."""


class Sandbox(Protocol):
    """One workspace and the commands that run in it, one at a time; others wait for their turn.

    Nothing that a command starts outlives it: no process, no connection. Files do, until `close`, after which
    nothing is left: no process, no mount, no folder. The same holds when the process that opened it is killed.
    Paths are relative to the workspace (or begin with `WORKSPACE`); no link is followed. File methods raise
    WorkspaceError. `run` raises ForgeError where the sandbox itself fails, never for anything the command does.
    """

    #: the limits that this machine cannot keep, in words; () where it keeps all
    missing: tuple[str, ...]

    async def run(self, command: str, stdin: bytes = b"", limits: Limits = ..., guest: Guest | None = None) -> Result:
        """Run a line of bash to its end or its limits, as a `guest`'s where there is one. Cancelling ends the command
        first."""
        ...

    def read(self, path: str) -> bytes:
        """A whole file, of at most `files.LONGEST` bytes."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Make a file, and folders to it, or replace what is in it."""
        ...

    def entries(self) -> list[Entry]:
        """The files in order of their paths, at most `files.MOST`."""
        ...

    async def close(self) -> None: ...
