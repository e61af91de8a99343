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
    async def start(before: Sequence[str], after: Sequence[str], stdin: bytes, join: Callable[[int], None]) -> Command:
        """Set up all but the command itself, as arguments `before` and `after` those of ours say; `join` is told the
        first process before it starts another. Raises ForgeError."""
        info, info_there = os.pipe()
        held, release = os.pipe()
        given = os.memfd_create("stdin")
        os.write(given, stdin)
        os.lseek(given, 0, os.SEEK_SET)
        pipes = ("--info-fd", str(info_there), "--block-fd", str(held))
        outer = None
        try:
            try:
                outer = Child([*before, *pipes, *after], stdin=given, keep=(info_there, held))
            finally:
                for descriptor in (info_there, held, given):
                    os.close(descriptor)
            number = json.loads(await read_all(info))["child-pid"]
            first = os.pidfd_open(number)
            join(number)
        except BaseException as error:
            os.close(release)
            said = await _last_words(outer)
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
                os.write(self._release, b"\0")
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


async def _last_words(outer: Child | None) -> str:
    """End it, and what it said."""
    if outer is None:
        return ""
    await outer.end()
    said = await read_all(outer.output)
    os.close(outer.output)
    return said.decode(errors="replace").strip()
