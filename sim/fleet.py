"""Instances in SimPy: one event per span of iterations, never one per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sim.alarm import PLAN, Alarm
from sim.engine import Instance, Load
from sim.request import Request


class Listener(Protocol):
    """Is told what instances bring about, at the instant it happens."""

    def on_first_token(self, instance: int, request: Request) -> None: ...

    def on_end(self, instance: int, request: Request) -> None: ...

    def on_loaded(self, instance: int, version: int) -> None: ...


class Fleet:
    """All instances by id. Whoever changes one does it here, so that it is woken when it is due."""

    def __init__(self, env: Any, instances: Sequence[Instance], listener: Listener) -> None:
        self.env = env
        self.instances = instances
        self._listener = listener
        self._planned: list[int] = [-1] * len(instances)  # when the newest wake-up of each rings
        self._alarms = [Alarm(env, PLAN, self._rang, i) for i in range(len(instances))]

    def add(self, i: int, request: Request) -> None:
        self.instances[i].add(request, self.env.now)
        self._wake(i)

    def cancel(self, i: int, request: Request) -> bool:
        """True where it was still waiting and is gone at once; else `on_end` follows."""
        gone = self.instances[i].cancel(request, self.env.now)
        self._wake(i)
        return gone

    def load(self, i: int, load: Load) -> None:
        self.instances[i].load(load, self.env.now)
        self._wake(i)

    def let_go(self, i: int, request: Request) -> None:
        self.instances[i].let_go(request, self.env.now)
        self._wake(i)

    def insert(self, i: int, path: tuple[tuple[int, int], ...], blocks: int) -> None:
        self.instances[i].insert(path, blocks, self.env.now)
        self._wake(i)

    def forget(self, chains: list[int]) -> None:
        for instance in self.instances:
            instance.forget(chains, self.env.now)

    def crash(self, i: int) -> list[Request]:
        self._planned[i] = -1
        return self.instances[i].crash(self.env.now)

    def up(self, i: int, version: int) -> None:
        """It is back from a crash, with these weights."""
        self.instances[i].version = version

    def _rang(self, alarm: Alarm) -> None:
        i: int = alarm.about
        if self._planned[i] == self.env.now:
            self._advance(i)

    def _wake(self, i: int) -> None:
        """See that `_advance(i)` runs when the instance is due. Wake-ups that came to nothing are ignored."""
        due = self.instances[i].due()
        if due is not None and due != self._planned[i]:
            self._planned[i] = due
            self._alarms[i].set(due)

    def _advance(self, i: int) -> None:
        instance, listener = self.instances[i], self._listener
        self._planned[i] = -1
        instance.advance(self.env.now)
        for request in instance.first_tokens:
            listener.on_first_token(i, request)
        for request in instance.ended:
            listener.on_end(i, request)
        if instance.loaded is not None:
            listener.on_loaded(i, instance.loaded)
        self._wake(i)
