from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import pytest

from forge.live.child import Child

pytest.importorskip("uvloop")
import uvloop


def echo(pipe: Connection) -> None:
    while True:
        pipe.send(pipe.recv())


def slow_reader(pipe: Connection) -> None:
    """Reads nothing until told how many there are to come; then reports them all."""
    import time

    time.sleep(1.0)
    pipe.send(("got", [pipe.recv()[0] for _ in range(3000)]))


async def gather(child: Child, wanted: int) -> list[Any]:
    got: list[Any] = []
    full = asyncio.Event()

    def on_message(message: tuple[Any, ...]) -> None:
        got.append(message)
        if len(got) == wanted:
            full.set()

    child.watch(on_message, lambda: None)
    await asyncio.wait_for(full.wait(), 60)
    return got


def test_a_full_pipe_loses_nothing_and_blocks_nobody() -> None:
    """Under uvloop, which makes watched descriptors non-blocking, messages beyond the pipe's room were once lost."""

    async def run() -> None:
        child = Child("slow", slow_reader)
        try:
            for i in range(3000):
                child.send(i, b"x" * 2000)
            ((_, seen),) = await gather(child, 1)
            assert seen == list(range(3000))
        finally:
            child.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_big_messages_come_back_whole_and_in_order() -> None:
    async def run() -> None:
        child = Child("echo", echo)
        try:
            for i in range(40):
                child.send(i, bytes([i]) * 500_000)
            got = await gather(child, 40)
            assert [(i, len(data), data[0]) for i, data in got] == [(i, 500_000, i) for i in range(40)]
        finally:
            child.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_death_is_told_once_and_a_stop_not_at_all() -> None:
    async def run() -> None:
        told = []
        child = Child("echo", echo)
        child.watch(lambda _message: None, lambda: told.append("dead"))
        os.kill(child.pid, signal.SIGKILL)
        for _ in range(200):
            if told:
                break
            await asyncio.sleep(0.05)
        assert told == ["dead"]
        child.send("into the void")
        child.stop()
        other = Child("echo", echo)
        other.watch(lambda _message: None, lambda: told.append("stopped"))
        other.stop()
        await asyncio.sleep(0.1)
        assert told == ["dead"]

    asyncio.run(run())
