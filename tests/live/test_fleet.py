"""An engine process that is killed: its requests fail, clients may come again, a new process takes its place."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from forge.gateway.backend import Overloaded
from forge.live.fleet import Fleet
from forge.models import resolve
from forge.rollout.engine import Delta, EngineError, EngineRequest, Sampling
from forge.scenario import Scenario, parse
from forge.types import ForgeError


class Told:
    """FleetEvents that remember."""

    def __init__(self) -> None:
        self.down: list[int] = []
        self.up: list[tuple[int, int]] = []
        self.loaded: list[tuple[int, int]] = []
        self.failed: list[Exception] = []

    def instance_loaded(self, instance: int, version: int, seconds: float) -> None:
        assert seconds >= 0
        self.loaded.append((instance, version))

    def instance_down(self, instance: int, reason: str) -> None:
        assert reason
        self.down.append(instance)

    def instance_up(self, instance: int, version: int) -> None:
        self.up.append((instance, version))

    def fail(self, error: Exception) -> None:
        self.failed.append(error)


def scenario(**engine: object) -> Scenario:
    section = {"kind": "fake", "instances": 2, "slots": 2, "max_context": 4096, **engine}
    return parse({"name": "t", "stop": {"items": 1}, "domains": [{"name": "calc"}], "engine": section}, "test")


async def tokens(fleet: Fleet, index: int, name: str, count: int) -> list[Delta]:
    request = EngineRequest(id=name, prompt_ids=(1, 2), sampling=Sampling(max_tokens=count))
    return [delta async for delta in fleet.generate(index, request)]


async def wait_for(condition: object) -> None:
    assert callable(condition)
    for _ in range(600):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("did not happen within 30 s")


def test_a_killed_engine_is_replaced_and_serves_the_newest_weights() -> None:
    async def run() -> None:
        told, model = Told(), resolve("quickstart")
        fleet = Fleet(scenario(), model, 0, told)
        try:
            await fleet.start()
            assert len(await tokens(fleet, 0, "a", 3)) >= 1
            fleet.load(model, 4, "in_flight")
            await wait_for(lambda: len(told.loaded) == 2)
            before = fleet.counters()
            going = asyncio.create_task(tokens(fleet, 1, "b", 4000))
            await asyncio.sleep(0.05)
            os.kill(fleet.pids()[1], signal.SIGKILL)
            with pytest.raises(Overloaded):
                await going
            assert told.down == [1]
            assert fleet.versions() == [4]
            await wait_for(lambda: told.up == [(1, 4)])
            after = await tokens(fleet, 1, "c", 3)
            assert {v for d in after for v in d.versions} == {4}
            await tokens(fleet, 0, "d", 3)
            assert all(new[3] >= old[3] for old, new in zip(before, fleet.counters(), strict=True)), "counters fell"
            assert told.failed == []
        finally:
            fleet.stop()

    asyncio.run(run())


def test_what_a_starting_engine_reads_is_still_needed() -> None:
    async def run() -> None:
        told, model = Told(), resolve("quickstart")
        fleet = Fleet(scenario(), model, 0, told)
        try:
            await fleet.start()
            assert fleet.oldest == 0
            fleet.load(model, 4, "in_flight")
            await wait_for(lambda: len(told.loaded) == 2)
            assert fleet.oldest == 4
            os.kill(fleet.pids()[1], signal.SIGKILL)
            await wait_for(lambda: told.down == [1])
            fleet.load(model, 6, "in_flight")
            await wait_for(lambda: (0, 6) in told.loaded)
            assert fleet.oldest == 4, "the new process begins with it"
            await wait_for(lambda: told.up == [(1, 6)])
            assert fleet.oldest == 6
        finally:
            fleet.stop()

    asyncio.run(run())


def test_an_engine_that_cannot_start_is_a_clear_error() -> None:
    async def run() -> None:
        fleet = Fleet(scenario(instances=1, max_context=1), resolve("quickstart"), 0, Told())
        try:
            with pytest.raises(ForgeError, match="max_context 1: too small"):
                await fleet.start()
        finally:
            fleet.stop()

    asyncio.run(run())


def test_a_refused_request_raises_and_leaves_the_engine_well() -> None:
    async def run() -> None:
        fleet = Fleet(scenario(instances=1, max_context=16), resolve("quickstart"), 0, Told())
        try:
            await fleet.start()
            request = EngineRequest(id="x", prompt_ids=(1,) * 16, sampling=Sampling())
            with pytest.raises(EngineError):
                await anext(fleet.generate(0, request))
            assert await tokens(fleet, 0, "y", 2)
        finally:
            fleet.stop()

    asyncio.run(run())
