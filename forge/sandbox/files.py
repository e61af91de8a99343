"""A workspace's files, seen from outside: every path is walked folder by folder, and no link is followed.

Commands may change anything meanwhile. So a path is never checked and then used: each step opens what it found.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forge.sandbox.base import WORKSPACE, Entry, WorkspaceError

#: bytes of a file that is read
LONGEST = 2**20
#: what every file counts for at least, in bytes: they are not to be without number
LEAST = 4096
#: entries that are listed, and folders deep that are looked into
MOST, DEEPEST = 1000, 32

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe that nobody writes to must not stop us


def parts_of(path: str) -> list[str]:
    """The names along a path. Raises WorkspaceError where it leads out of the workspace, or nowhere."""
    if path.startswith("/") and not path.startswith(WORKSPACE + "/"):
        raise WorkspaceError(f"{path}: outside {WORKSPACE}")
    parts = [part for part in path.removeprefix(WORKSPACE + "/").split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in path:
        raise WorkspaceError(f"{path!r}: not a path within {WORKSPACE}")
    if len(parts) > DEEPEST:
        raise WorkspaceError(f"{path}: more than {DEEPEST} folders deep")
    return parts


class Files:
    """Reads and writes below the folder open as `folder`, which it closes, as the user whom commands run as."""

    def __init__(self, folder: int) -> None:
        self.folder = folder
        self._owner = os.fstat(folder)

    def close(self) -> None:
        os.close(self.folder)

    def read(self, path: str) -> bytes:
        with self._at(path) as (parent, name), _opened(name, os.O_RDONLY, parent) as file:
            _regular(file, path)
            data = os.read(file, LONGEST + 1)
            while len(data) <= LONGEST and (more := os.read(file, LONGEST + 1 - len(data))):
                data += more
        if len(data) > LONGEST:
            raise WorkspaceError(f"{path}: longer than {LONGEST} bytes")
        return data

    def write(self, path: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT
        with self._at(path, make=True) as (parent, name), _opened(name, flags, parent) as file:
            _regular(file, path)
            os.ftruncate(file, 0)
            while data:
                data = data[os.write(file, data) :]

    def entries(self) -> list[Entry]:
        """Also of a folder in which files come and go."""
        found: list[Entry] = []
        with _acting_as(self._owner):
            self._list(self.folder, "", found)
        return sorted(found, key=lambda entry: entry.path)

    def _list(self, folder: int, prefix: str, found: list[Entry]) -> None:
        for name in sorted(os.listdir(folder)):
            if len(found) >= MOST:
                return
            try:
                about = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISDIR(about.st_mode) and prefix.count("/") < DEEPEST:
                    with _opened(name, _FOLDER, folder) as inner:
                        self._list(inner, f"{prefix}{name}/", found)
                else:
                    found.append(Entry(prefix + name, about.st_size if stat.S_ISREG(about.st_mode) else None))
            except OSError:  # gone, or closed to us
                continue

    @contextmanager
    def _at(self, path: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The open folder that a path ends in, and the name in it; what the system says of it, as a WorkspaceError."""
        *folders, name = parts_of(path)
        at = os.dup(self.folder)
        try:
            with _acting_as(self._owner):
                for folder in folders:
                    if make:
                        with suppress(FileExistsError):
                            os.mkdir(folder, 0o755, dir_fd=at)
                    inner = os.open(folder, _FOLDER, dir_fd=at)
                    os.close(at)
                    at = inner
                yield at, name
        except OSError as error:
            raise WorkspaceError(f"{path}: {error.strerror}") from None
        finally:
            os.close(at)


def used_bytes(folder: int, *, deep: int = 0) -> int:
    """Bytes on disk below an open folder, as far as it holds still; `LEAST` or more for each name."""
    total = 0
    for name in os.listdir(folder):
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            total += max(about.st_blocks * 512, LEAST)
            if stat.S_ISDIR(about.st_mode) and deep < DEEPEST:
                with _opened(name, _FOLDER, folder) as inner:
                    total += used_bytes(inner, deep=deep + 1)
        except OSError:
            continue
    return total


@contextmanager
def _opened(name: str, flags: int, at: int) -> Iterator[int]:
    file = os.open(name, flags | _FILE, 0o644, dir_fd=at)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def _acting_as(owner: os.stat_result) -> Iterator[None]:
    """Root's files are not known in the namespace of a sandbox: this thread alone touches files as another user."""
    if os.geteuid() != 0:
        yield
        return
    system = ctypes.CDLL(None)
    system.setfsgid(owner.st_gid)
    system.setfsuid(owner.st_uid)
    try:
        yield
    finally:
        system.setfsuid(0)
        system.setfsgid(os.getegid())


def _regular(file: int, path: str) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise WorkspaceError(f"{path}: not a file")
