"""What a hostile command might try, tried; and whether anything is left when sandboxes end.

Every attempt aims at something real outside: a file, a port that listens, our environment, this process. Where one
succeeds it harms no more than these: what belongs to the system is opened for writing, and not written.
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from forge.sandbox.base import Limits, Result, Sandbox, WorkspaceError
from forge.sandbox.cgroups import here

LIMITS = Limits(seconds=20.0, cpu_seconds=10, memory_mib=64, processes=32, output_kib=16)
DISK_MIB = 16
_SHORT = replace(LIMITS, seconds=1.0)

Check = Callable[[Result], bool]


@dataclass(frozen=True, slots=True)
class Outside:
    """What must stay untouched and unknown: a file that holds `word`, as our environment does, and a port."""

    secret: Path
    word: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Escape:
    """SECRET and PORT in `command` are those outside; `shows`: the result says that it failed as it must."""

    name: str
    command: str
    shows: Check
    limits: Limits = LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`said` is the last line of the output."""

    name: str
    contained: bool
    met: tuple[str, ...] = ()
    exit_code: int | None = None
    said: str = ""


def _said(word: str, unless: str = "\0") -> Check:
    return lambda result: word in result.output and unless not in result.output


def _met(limit: str, word: str = "\0") -> Check:
    """`word`: what the output says where this machine does not count the limit."""
    return lambda result: limit in result.met or word in result.output


_CONNECT = """python3 - <<'END'
import socket
for host, port in (("127.0.0.1", PORT), ("1.1.1.1", 53)):
    try:
        socket.create_connection((host, port), timeout=2)
        print("connected")
    except OSError as error:
        print("refused", error)
END
[ "$(grep -c : /proc/net/dev)" = 1 ] && echo only loopback"""
_DAEMON = """python3 - <<'END'
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for pipe in range(3):
            os.close(pipe)
        open("here", "w").close()
        time.sleep(600)
    os._exit(0)
while not os.path.exists("here"):
    time.sleep(0.01)
END
echo left behind"""
_FOLDERS = "/home /root /mnt /var /work ../home"
_MANY = """for i in 1 2 3 4 5 6; do python3 -c 'x = b"1" * (40 << 20); import time; time.sleep(5)' & done; wait"""
_TRIES = ("unshare -Ur true", "unshare -m true", "mount -t tmpfs x /workspace", "mknod disk b 8 0", "chroot / true")
_MADE = f"({' || '.join(_TRIES)}) && echo made"

ESCAPES = (
    Escape(name="network", command=_CONNECT, shows=_said("only loopback", unless="connected")),
    Escape(
        name="parent folders",
        command=f"cat SECRET ../../..SECRET /proc/1/root/SECRET; ls -d {_FOLDERS}; echo looked",
        shows=lambda result: result.output.count("No such file") == 9,
    ),
    Escape(
        name="system files",
        command="for f in /x /usr/x /usr/bin/env /etc/x /dev/x /proc/x; do : >> $f && echo wrote; done; echo kept",
        shows=_said("kept", unless="wrote"),
    ),
    Escape(
        name="proc",
        command="cat /proc/*/environ; for f in sys/kernel/sysrq sysrq-trigger sys/kernel/core_pattern; do "
        ": >> /proc/$f && echo wrote; done; [ $(ls -d /proc/[0-9]* | wc -l) -lt 8 ] && echo few processes",
        shows=_said("few processes", unless="wrote"),
    ),
    Escape(
        name="fork bomb",
        command="python3 -c 'import os\nwhile True: os.fork()'",
        shows=_met("processes", "Resource temporarily unavailable"),
    ),
    Escape(name="memory", command="""python3 -c 'x = b"1" * (1 << 30)'""", shows=_met("memory", "MemoryError")),
    Escape(name="memory of many", command=_MANY, shows=_met("memory")),
    Escape(
        name="disk fill",
        command="for d in /workspace /tmp /dev/shm; do head -c 1G /dev/zero > $d/full; done; true",
        shows=_met("disk"),
    ),
    Escape(name="file count", command="i=0; while : > f$i; do i=$((i + 1)); done", shows=_met("disk")),
    Escape(name="symlink", command="ln -s SECRET link; ln -s / root; cat link", shows=_said("No such file")),
    Escape(name="named pipe", command="mkfifo link && mkdir -p root/etc && mkfifo root/etc/passwd", shows=_said("")),
    Escape(name="long sleep", command="sleep 600", shows=_met("time"), limits=_SHORT),
    Escape(
        name="deaf and silent",
        command="trap '' TERM INT HUP QUIT; exec > /dev/null 2>&1 < /dev/null; while :; do sleep 1; done",
        shows=_met("time"),
        limits=_SHORT,
    ),
    Escape(
        name="signal to parent",
        command=f"kill -9 {os.getpid()}; kill -9 1 $PPID; kill -9 -{os.getpgid(0)}; echo alive",
        shows=_said("alive"),
    ),
    Escape(name="background daemon", command=_DAEMON, shows=_said("left behind")),
    Escape(name="output flood", command="yes", shows=_met("output")),
    Escape(name="processor", command="while :; do :; done", shows=_met("cpu"), limits=replace(LIMITS, cpu_seconds=1)),
    Escape(name="new namespace", command=f"{_MADE}; echo tried", shows=_said("tried", unless="made")),
)


async def attempt(escape: Escape, sandbox: Sandbox, outside: Outside) -> Report:
    """One escape, in a sandbox of its own."""
    mark = f"battery-{secrets.token_hex(8)}"
    command = escape.command.replace("SECRET", str(outside.secret)).replace("PORT", str(outside.port))
    result = await sandbox.run(f": {mark}\n{command}", limits=escape.limits)
    seen = result.output + _through(sandbox, "link") + _through(sandbox, "root/etc/passwd")
    return Report(
        name=escape.name,
        contained=escape.shows(result) and outside.word not in seen and "root:x:" not in seen and not processes(mark),
        met=result.met,
        exit_code=result.exit_code,
        said=(result.output.strip().splitlines() or [""])[-1][:100],
    )


def _through(sandbox: Sandbox, path: str) -> str:
    """What a path gives away; something is written to it as well."""
    found = ""
    with suppress(WorkspaceError):
        found = sandbox.read(path).decode(errors="replace")
    with suppress(WorkspaceError):
        sandbox.write(path, b"overwritten")
    return found


async def battery(open_sandbox: Callable[[], Awaitable[Sandbox]]) -> list[Report]:
    """Every escape, one after another; the last report says whether what is outside is as it was."""
    reports = []
    with outside() as (goal, connected):
        for escape in ESCAPES:
            sandbox = await open_sandbox()
            try:
                reports.append(await attempt(escape, sandbox, goal))
            finally:
                await sandbox.close()
        untouched = goal.secret.read_text(encoding="ascii") == goal.word and not connected()
    return [*reports, Report(name="nothing outside touched", contained=untouched)]


@contextmanager
def outside() -> Iterator[tuple[Outside, Callable[[], bool]]]:
    """The goals, and whether anybody has connected to the port."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        secret = Path(folder) / "secret"
        secret.write_text(word, encoding="ascii")
        os.chmod(folder, 0o777)  # whoever reaches it may write
        os.chmod(secret, 0o666)
        os.environ["FORGE_BATTERY"] = word

        def connected() -> bool:
            with suppress(BlockingIOError):
                server.accept()[0].close()
                return True
            return False

        try:
            yield Outside(secret, word, server.getsockname()[1]), connected
        finally:
            del os.environ["FORGE_BATTERY"]


def processes(mark: str) -> int:
    """How many on this machine have it on their command line."""
    found = 0
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found += mark.encode() in line.read_bytes()
    return found


def left() -> dict[str, int]:
    """What sandboxes could leave with this process: children, mounts, folders (control groups), descriptors."""
    groups = {group for place in here().values() for group in place.folder.glob(f"forge-{os.getpid()}-*")}
    return {
        "processes": sum(len(line.read_text().split()) for line in Path("/proc/self/task").glob("*/children")),
        "mounts": len(Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()),
        "folders": len(groups),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
