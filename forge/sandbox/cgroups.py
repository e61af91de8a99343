"""Limits on all processes of a sandbox together, where this process may make control groups (version 1 or 2)."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forge.sandbox.base import Limits, Met
from forge.temporary import lives

CONTROLLERS = ("memory", "pids", "cpu")
_NAME = re.compile(r"forge-(\d+)-\d+")
_MIB = 2**20
_PERIOD_US = 100_000
_COUNT = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which groups with one controller can be made."""

    folder: Path
    version: int


def find_places(own: str, mounts: str) -> dict[str, Place]:
    """By controller, from the text of /proc/self/cgroup and /proc/self/mountinfo; only where we may write."""
    roots = dict(_roots(mounts))
    found: dict[str, Place] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(",") if names else ["unified"]:
            if name in CONTROLLERS and name in roots and (folder := _below(roots[name], path)):
                found[name] = Place(folder, 1)
            elif name == "unified" and name in roots:
                # Beside our own group: one that holds processes can have none with controllers below it.
                folder = _below(roots[name], os.path.dirname(path))
                for controller in _delegated(folder) if folder else ():
                    found.setdefault(controller, Place(folder or roots[name], 2))
    return found


def _roots(mounts: str) -> Iterator[tuple[str, Path]]:
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2":
            yield "unified", Path(before.split(" ")[4])
        elif kind == "cgroup":
            yield from ((option, Path(before.split(" ")[4])) for option in options.split(",") if option in CONTROLLERS)


def _below(root: Path, path: str) -> Path | None:
    """In a container the path may be one of its host: then the root that it was given."""
    folder = root / path.lstrip("/")
    folder = folder if folder.is_dir() else root
    return folder if os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK) else None


def _delegated(folder: Path) -> list[str]:
    enabled = (folder / "cgroup.subtree_control").read_text(encoding="ascii").split()
    return [name for name in CONTROLLERS if name in enabled]


def here() -> dict[str, Place]:
    """What this machine and this user allow; {} where there are no cgroups."""
    try:
        texts = [Path(f"/proc/self/{name}").read_text(encoding="utf-8") for name in ("cgroup", "mountinfo")]
        return find_places(*texts)
    except OSError:
        return {}


class Cgroup:
    """One group under each place, made at once. Groups of processes that are no more are removed."""

    def __init__(self, places: dict[str, Place]) -> None:
        self.places = places
        name = f"forge-{os.getpid()}-{next(_COUNT)}"
        self._groups = {controller: place.folder / name for controller, place in places.items()}
        for folder in {place.folder for place in places.values()}:
            _sweep(folder)
            (folder / name).mkdir()

    def limit(self, limits: Limits, files_mib: int) -> None:
        """`files_mib`: of memory that files may take beside the processes, as both are counted together."""
        memory = str((limits.memory_mib + files_mib) * _MIB)
        quota = max(1000, int(limits.cores * _PERIOD_US))
        self._set("memory", "memory.limit_in_bytes", "memory.max", memory)
        self._set("pids", "pids.max", "pids.max", str(limits.processes))
        self._set("cpu", "cpu.cfs_quota_us", "cpu.max", str(quota))
        if (place := self.places.get("memory")) and place.version == 2:
            with suppress(OSError):  # no swap accounting
                (self._groups["memory"] / "memory.swap.max").write_text("0", encoding="ascii")

    def _set(self, controller: str, first: str, second: str, value: str) -> None:
        if place := self.places.get(controller):
            name = first if place.version == 1 else second
            (self._groups[controller] / name).write_text(value, encoding="ascii")

    def add(self, process: int) -> None:
        """This process, and all that it will start."""
        for group in set(self._groups.values()):
            (group / "cgroup.procs").write_text(str(process), encoding="ascii")

    def counts(self) -> dict[Met, int]:
        """How often a process was killed for memory, and a fork refused, since the group was made."""
        found: dict[Met, int] = {}
        if place := self.places.get("memory"):
            name = "memory.oom_control" if place.version == 1 else "memory.events"
            found["memory"] = _entry(self._groups["memory"] / name, "oom_kill")
        if "pids" in self.places:
            found["processes"] = _entry(self._groups["pids"] / "pids.events", "max")
        return found

    async def remove(self) -> None:
        """Once its processes have ended; the kernel may take a moment to let go of them."""
        for group in set(self._groups.values()):
            for _ in range(200):
                try:
                    group.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    await asyncio.sleep(0.01)


def _entry(file: Path, key: str) -> int:
    pairs = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return next((int(value) for name, value in pairs if name == key), 0)


def _sweep(folder: Path) -> None:
    for other in folder.iterdir():
        if (found := _NAME.fullmatch(other.name)) and not lives(int(found[1])):
            with suppress(OSError):  # another of ours was faster
                other.rmdir()
