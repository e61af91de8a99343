"""The rollout instances of a live run: one engine process each, restarted when it dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from forge.gateway.backend import Overloaded
from forge.live import engine_worker
from forge.live.child import Child, Message, failure_of
from forge.policies.sync import SyncMode
from forge.rollout.engine import Delta, EngineError, EngineRequest
from forge.scenario import Scenario
from forge.types import ForgeError

MAX_RESTARTS = 5
Counters = tuple[float, int, int, int, int]  # busy seconds, steps, tokens prefilled, decoded and found cached
NONE: Counters = (0.0, 0, 0, 0, 0)


class FleetEvents(Protocol):
    """What the owner of a fleet is told, in its event loop."""

    def instance_loaded(self, instance: int, version: int, seconds: float) -> None: ...

    def instance_down(self, instance: int, reason: str) -> None: ...

    def instance_up(self, instance: int, version: int) -> None: ...

    def fail(self, error: Exception) -> None: ...


@dataclass
class _Instance:
    child: Child
    version: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    streams: dict[str, asyncio.Queue[Delta | Exception]] = field(default_factory=dict)
    counters: Counters = NONE
    before: Counters = NONE  # of earlier processes of this instance in this life
    restarts: int = 0
    broken: Exception | None = None  # it cannot start: no restart would help


class Fleet:
    """Starts engines, streams their tokens, hands them weights. All calls from one event loop."""

    def __init__(
        self,
        scenario: Scenario,
        weights: Path,
        version: int,
        events: FleetEvents,
        scratch: Path = engine_worker.SCRATCH,
    ) -> None:
        """`scratch`: where processes of engines write."""
        self._scenario = scenario
        self._scratch = scratch
        self._newest = (weights, version)
        self._events = events
        self._instances: list[_Instance] = []
        self.max_context = scenario.engine.max_context

    async def start(self) -> None:
        """Returns when every instance serves. Raises ForgeError when one cannot."""
        for index in range(self._scenario.engine.instances):
            self._instances.append(_Instance(self._spawn(index), self._newest[1]))
            self._watch(index)
        for instance in self._instances:
            await instance.ready.wait()
            if instance.broken is not None:
                raise instance.broken

    async def generate(self, index: int, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Deltas of one request. Raises EngineError when refused, Overloaded when the instance dies under it."""
        instance = self._instances[index]
        stream: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        instance.streams[request.id] = stream
        instance.child.send("add", request)
        try:
            while True:
                got = await stream.get()
                if isinstance(got, Exception):
                    raise got
                yield got
                if got.finish is not None:
                    return
        finally:
            if instance.streams.pop(request.id, None) is not None:
                instance.child.send("cancel", request.id)  # unknown there once finished: no harm

    def load(self, weights: Path, version: int, mode: SyncMode) -> None:
        """Every instance is asked to serve `version`; `instance_loaded` reports each."""
        self._newest = (weights, version)
        for instance in self._instances:
            instance.child.send("load", weights, version, mode)

    @property
    def oldest(self) -> int:
        """The lowest version that an engine may still read: the one it serves, or starts with; a load is of a later."""
        return min(instance.version for instance in self._instances)

    def versions(self) -> list[int]:
        """Served version of every live instance."""
        return [i.version for i in self._instances if i.ready.is_set()]

    def counters(self) -> list[Counters]:
        """Per instance since this life began, processes that died included."""
        return [_add(i.before, i.counters) for i in self._instances]

    def pids(self) -> list[int]:
        return [i.child.pid for i in self._instances]

    def stop(self) -> None:
        for instance in self._instances:
            instance.child.stop()

    # --- one instance ------

    def _spawn(self, index: int) -> Child:
        weights, version = self._newest
        return Child(f"engine-{index}", engine_worker.main, self._scenario, weights, version, index, self._scratch)

    def _watch(self, index: int) -> None:
        child = self._instances[index].child
        child.watch(lambda message: self._on_message(index, message), lambda: self._on_exit(index))

    def _on_message(self, index: int, message: Message) -> None:
        instance = self._instances[index]
        match message:
            case ("deltas", deltas, counters):
                instance.counters = counters
                for delta in deltas:
                    self._deliver(instance, delta.id, delta)
            case ("refused", request_id, text):
                self._deliver(instance, request_id, EngineError(text))
            case ("loaded", version, seconds):
                instance.version = version
                if instance.ready.is_set():
                    self._events.instance_loaded(index, version, seconds)
                else:
                    self._come_up(index)
            case ("load_failed", version, text):
                if version == self._newest[1]:
                    self._events.fail(ForgeError(f"engine {index} cannot load weights of version {version}: {text}"))
            case ("ready", max_context):
                self.max_context = min(self.max_context, max_context)
                self._come_up(index)
            case ("failed", *_):
                self._give_up(instance, failure_of(message))

    def _come_up(self, index: int) -> None:
        """It serves from now on, unless weights newer than those it started with are on their way to it."""
        instance = self._instances[index]
        if instance.version == self._newest[1]:
            instance.ready.set()
            if instance.restarts:
                self._events.instance_up(index, instance.version)

    def _give_up(self, instance: _Instance, error: Exception) -> None:
        instance.broken = error
        instance.ready.set()  # whoever waits for it reads `broken`
        self._events.fail(error)

    def _deliver(self, instance: _Instance, request_id: str, got: Delta | Exception) -> None:
        stream = instance.streams.get(request_id)
        if stream is not None:
            stream.put_nowait(got)

    def _on_exit(self, index: int) -> None:
        """The process died: its requests fail (clients send them again), a new one takes its place."""
        instance = self._instances[index]
        if instance.broken is not None:
            return
        instance.ready.clear()
        for stream in instance.streams.values():
            stream.put_nowait(Overloaded(1.0))
        instance.child.stop()
        if instance.restarts >= MAX_RESTARTS:
            self._give_up(instance, ForgeError(f"engine {index} died {MAX_RESTARTS + 1} times; see `forge doctor`"))
            return
        self._events.instance_down(index, "process died")
        instance.before, instance.counters = _add(instance.before, instance.counters), NONE
        instance.restarts += 1
        instance.version = self._newest[1]
        instance.child = self._spawn(index)
        self._watch(index)


def _add(a: Counters, b: Counters) -> Counters:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4])
