"""One run of bubblewrap: started stopped, put into its control group, released, and ended with all it started."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forge.sandbox.base import FLOOD, Limits, Met
from forge.sandbox.child import Child, end_process, read, read_all
from forge.types import ForgeError

# Bubblewrap goes on when the pipe that holds it is closed, as happens where we are killed meanwhile, and binds itself
# to its parent only later. So the command begins behind a second gate, which opens for a word alone.
_GO = b"\0go\n"
_GATE = 'read -r -u "$0" word && [ "$word" = go ] && gate=$0 && exec {gate}<&- && exec "$@"'


@dataclass(frozen=True, slots=True)
class Ended:
    """`ended_for`: the limit for which Forge ended it; then the exit code means nothing."""

    exit_code: int
    output: bytes
    cut: bool
    ended_for: Met | None


class Command:
    """`outer` is bubblewrap outside, `first` (a pidfd) the first process inside: with it all others there end.

    The kernel says that the first has ended only once the others have.
    """

    def __init__(self, outer: Child, first: int, release: int) -> None:
        self._outer = outer
        self._first = first
        self._release = release
        self._output = bytearray()
        self._written = 0

    @staticmethod
    async def start(
        bubblewrap: Sequence[str],
        command: Sequence[str],
        stdin: bytes,
        join: Callable[[int], None],
        keep: tuple[int, ...] = (),
    ) -> Command:
        """Set up all but the command itself; `join` is told the first process before it starts another. Descriptors to
        `keep` stay open in it. Raises ForgeError."""
        info, info_there = os.pipe()
        held, release = os.pipe()
        given = os.memfd_create("stdin")
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        gate = os.dup(held)
        pipes = ("--info-fd", str(info_there), "--block-fd", str(held), "bash", "-c", _GATE, str(gate))
        try:
            outer = Child([*bubblewrap, *pipes, *command], stdin=given, keep=(info_there, held, gate, *keep))
        except OSError as error:
            os.close(info)
            os.close(release)
            raise ForgeError(f"sandbox: {bubblewrap[0]}: {error.strerror}") from None
        finally:
            for descriptor in (info_there, held, gate, given):
                os.close(descriptor)
        told = asyncio.ensure_future(read_all(info))
        try:
            number = json.loads(await asyncio.shield(told))["child-pid"]
            first = os.pidfd_open(number)
            join(number)
        except BaseException as error:
            said = await _given_up(outer, told, release)
            if isinstance(error, (ValueError, OSError)):
                raise ForgeError(f"sandbox: bubblewrap did not start: {said or error}") from None
            raise
        finally:
            os.close(info)
        return Command(outer, first, release)

    async def end(self, limits: Limits, full: Callable[[], Awaitable[None]] | None) -> Ended:
        """Let it run until it ends, or a limit is met; `full` returns when there is no more room."""
        kept, flood = limits.output_kib * 1024, asyncio.Event()
        reading = asyncio.ensure_future(self._read(kept, flood))
        ends: dict[asyncio.Future[object], Met | None] = {asyncio.ensure_future(self._outer.ended()): None}
        ends[asyncio.ensure_future(flood.wait())] = "output"
        if full is not None:
            ends[asyncio.ensure_future(full())] = "disk"
        try:
            with suppress(BrokenPipeError):  # it has ended
                os.write(self._release, _GO)
            done, _ = await asyncio.wait(ends, timeout=limits.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in ends:
                waiting.cancel()
            code = await _whole(self._finish(reading))
        # A command that ended in the same moment in which it met a limit has ended.
        found = [ends[one] for one in done] or ["time"]
        return Ended(code, bytes(self._output), self._written > kept, None if None in found else found[0])

    async def _read(self, kept: int, flood: asyncio.Event) -> None:
        """All it writes, until nobody is left who could."""
        while chunk := await read(self._outer.output):
            self._output += chunk[: max(0, kept - len(self._output))]
            self._written += len(chunk)
            if self._written > FLOOD * kept:
                flood.set()

    async def _finish(self, reading: asyncio.Future[None]) -> int:
        """All its processes are ended; the exit code of an end of its own."""
        await asyncio.sleep(0)  # those who waited let go of what they waited for
        await end_process(self._first)
        os.close(self._release)
        code = await self._outer.end()
        await reading
        os.close(self._outer.output)
        return code


async def _whole(work: Awaitable[int]) -> int:
    """Its result, and its end even where the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


async def _given_up(outer: Child, told: asyncio.Future[bytes], release: int) -> str:
    """Let it end by itself, as the gate stays shut: killed before it has told, it would leave a child that waits for
    it. What it said."""
    await asyncio.wait([told])
    os.close(release)
    await outer.ended()
    await outer.end()
    said = await read_all(outer.output)
    os.close(outer.output)
    return said.decode(errors="replace").strip()
