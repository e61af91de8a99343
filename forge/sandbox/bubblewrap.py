"""A `Sandbox` by bubblewrap: namespaces of its own, a read-only system, limits, and an end to every process."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path

from forge.sandbox import cgroups
from forge.sandbox.base import HOME, WORKSPACE, Entry, Guest, Limits, Met, Result
from forge.sandbox.child import PATH
from forge.sandbox.command import Command, Ended
from forge.sandbox.files import Files, used_bytes
from forge.sandbox.guest import Entrance, bound, opened
from forge.sandbox.holder import UNPRIVILEGED, Holder
from forge.types import ForgeError

_MIB = 2**20
#: how often the size of a folder is looked at, in seconds
_LOOK_S = 0.2
_MERGED = ("bin", "lib", "lib32", "lib64", "sbin")
#: what programs read of /etc; nothing in it is of this machine's users, hosts or keys
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types", "ssl/certs")
_SIGNALLED = {128 + 24: "cpu", 128 + 25: "disk"}  # SIGXCPU, SIGXFSZ, as shells say it


class Bubblewrap:
    """See `Sandbox`. With `folder` the workspace is that folder of this machine, and outlives the sandbox."""

    def __init__(self, holder: Holder, files: Files, group: cgroups.Cgroup, disk_mib: int, folder: Path | None) -> None:
        self._holder = holder
        self._files = files
        self._group = group
        self._disk_mib = disk_mib
        self._folder = folder
        self._turn = asyncio.Lock()
        self._closed = False
        self.missing = missing(group.places, folder is not None)

    @staticmethod
    async def open(*, disk_mib: int = 64, folder: Path | None = None) -> Bubblewrap:
        """`disk_mib`: of files, with those in /tmp and /dev/shm; of a `folder` without them. Raises ForgeError."""
        holder = await Holder.start(disk_mib, _owner(folder))
        try:
            files = Files(os.open(folder, os.O_RDONLY | os.O_DIRECTORY) if folder else holder.open("workspace"))
            group = cgroups.Cgroup(cgroups.here())
        except OSError as error:
            await holder.end()
            raise ForgeError(f"sandbox: {error.filename}: {error.strerror}") from None
        return Bubblewrap(holder, files, group, disk_mib, folder)

    async def run(
        self,
        command: str,
        stdin: bytes = b"",
        limits: Limits = Limits(),  # noqa: B008 - frozen
        guest: Guest | None = None,
    ) -> Result:
        async with self._turn:
            if self._closed:
                raise ForgeError("sandbox: it is closed")
            self._group.limit(limits, self._disk_mib + (guest.home_mib if guest else 0))
            before = self._group.counts()
            began = time.monotonic()
            with opened(guest) as entrance:
                inside = [*entrance.opens, *self._per_process(limits, guest), "--", "bash", "-c", command]
                outside = self._bubblewrap(guest, entrance)
                running = await Command.start(outside, inside, stdin, self._group.add, entrance.keep)
                async with entrance.served():
                    ended = await running.end(limits, self._full if self._folder else None)
            return self._result(ended, time.monotonic() - began, before)

    def _result(self, ended: Ended, seconds: float, before: dict[Met, int]) -> Result:
        met: dict[Met, None] = {}
        if ended.ended_for is not None:
            met[ended.ended_for] = None
        elif signalled := _SIGNALLED.get(ended.exit_code or 0):
            met["cpu" if signalled == "cpu" else "disk"] = None
        met |= {name: None for name, count in self._group.counts().items() if count > before[name]}
        if self._no_room():
            met["disk"] = None
        return Result(
            exit_code=None if ended.ended_for else ended.exit_code,
            output=ended.output.decode(errors="replace"),
            cut=ended.cut,
            seconds=seconds,
            met=tuple(met),
        )

    def _no_room(self) -> bool:
        if self._folder:
            return used_bytes(self._files.folder) >= self._disk_mib * _MIB
        left = os.fstatvfs(self._files.folder)
        return left.f_bavail == 0 or left.f_ffree == 0

    async def _full(self) -> None:
        """Returns once a folder holds more than it may."""
        while not self._no_room():
            await asyncio.sleep(_LOOK_S)

    def _per_process(self, limits: Limits, guest: Guest | None) -> list[str]:
        largest = max(self._disk_mib, guest.home_mib if guest else 0)
        arguments = ["prlimit", "--core=0", "--nofile=1024", f"--fsize={largest * _MIB}"]
        arguments.append(f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds + 1}")
        if "pids" not in self._group.places:
            arguments.append(f"--nproc={limits.processes}")
        if "memory" not in self._group.places:
            # The run-times that agents are written in reserve far more addresses than they use.
            arguments.append(f"--{'data' if guest else 'as'}={limits.memory_mib * _MIB}")
        return arguments

    def _bubblewrap(self, guest: Guest | None, entrance: Entrance) -> list[str]:
        binds = (str(self._folder) if self._folder else self._holder.path("workspace"), WORKSPACE)
        return [
            *self._holder.prefix,
            "bwrap",
            # Each namespace anew, none within it, no capability in it, no terminal to type into.
            *("--unshare-user", "--unshare-all", "--disable-userns", "--cap-drop", "ALL"),
            *("--die-with-parent", "--new-session", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
            *_system(),
            *("--proc", "/proc", "--dev", "/dev", "--bind", self._holder.path("shm"), "/dev/shm"),
            *("--bind", *binds, "--bind", self._holder.path("tmp"), "/tmp"),
            *(bound(guest, entrance) if guest else ()),
            # Else both are file systems to write to, of a size that nobody limits.
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORKSPACE),
            *("--setenv", "PATH", PATH, "--setenv", "LANG", "C.UTF-8"),
            *(part for name, value in _variables(guest).items() for part in ("--setenv", name, value)),
        ]

    def read(self, path: str) -> bytes:
        return self._files.read(path)

    def write(self, path: str, data: bytes) -> None:
        self._files.write(path, data)

    def entries(self) -> list[Entry]:
        return self._files.entries()

    async def close(self) -> None:
        async with self._turn:
            if not self._closed:
                self._closed = True
                self._files.close()
                await self._holder.end()
                await self._group.remove()


def _variables(guest: Guest | None) -> dict[str, str]:
    return {"HOME": HOME, **guest.environment} if guest else {"HOME": WORKSPACE}


def _owner(folder: Path | None) -> int:
    """Whom commands run as."""
    if folder is None:
        return os.geteuid() or UNPRIVILEGED
    if not folder.is_dir():
        raise ForgeError(f"sandbox: workspace {folder}: no such folder; make it first")
    owner = folder.stat().st_uid
    if owner == 0:  # without any capability root may still write to /proc/sys, whatever namespace it is in
        raise ForgeError(f"sandbox: workspace {folder}: belongs to root; chown -R {UNPRIVILEGED} {folder}")
    if os.geteuid() not in (0, owner):
        raise ForgeError(f"sandbox: workspace {folder}: belongs to user {owner}; choose a folder of yours")
    return owner


def _system() -> list[str]:
    """The system, read-only: programs and libraries, and no other folder of this machine."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _MERGED:
        path = Path("/") / name
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            arguments += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        arguments += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return arguments


def missing(places: dict[str, cgroups.Place], folder: bool) -> tuple[str, ...]:
    """The limits that cannot be kept, in words."""
    found = []
    if "memory" not in places:
        found.append("memory of all processes together (each has the limit for itself)")
    if "cpu" not in places:
        found.append("cores")
    if folder:
        found.append(f"disk at once (a folder is looked at every {_LOOK_S:g} s)")
    return tuple(found)


async def probe() -> str:
    """What `forge doctor` says of sandboxes here. Raises ForgeError where there are none."""
    sandbox = await Bubblewrap.open(disk_mib=1)
    try:
        result = await sandbox.run("echo it works")
    finally:
        with suppress(OSError):
            await sandbox.close()
    if result.output != "it works\n":
        raise ForgeError(f"sandbox: a first command failed: {result.output.strip()[:200]}")
    kept = ", ".join(sorted(cgroups.here())) or "none"
    return f"bubblewrap; cgroups: {kept}" + "".join(f"; not limited: {what}" for what in sandbox.missing)
