"""Reports from instances to routers, as late and as rare as in life."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from sim.alarm import SAMPLE, Alarm
from sim.clock import to_fs, to_s
from sim.front import Front
from sim.kv import ChainCache


class Report(NamedTuple):
    """One instance at `seen_s`. `queued_tokens`: of prompts, yet to be computed; `queued_pairs`: (query, key) pairs of
    their attention. `chains`: (chain, blocks held) of those that changed since its last report. A load that nobody
    reads is 0."""

    instance: int
    seen_s: float
    running: int
    waiting: int
    free_blocks: int
    queued_tokens: int
    queued_pairs: int
    chains: tuple[tuple[int, int], ...]


class Signals:
    """Every `period_s` each instance is sampled; `delay_s` later `deliver` gets the report.

    With a period of 0 instances are asked whenever a router looks: what it sees is then `delay_s` old only if that is 0
    too, so a delay needs a period. Call `refresh` before a view is made. `load` False: nobody reads it.
    """

    def __init__(
        self,
        env: Any,
        fleet: Front,
        period_s: float,
        delay_s: float,
        deliver: Callable[[Report], None],
        *,
        load: bool = True,
    ) -> None:
        self._env = env
        self._fleet = fleet
        self._period, self._delay = to_fs(period_s), to_fs(delay_s)
        self._deliver = deliver
        self._sample = self._all if load else self._chains
        self._under_way: deque[tuple[int, list[Report]]] = deque()
        self._last = [(-1, -1, -1, -1, -1)] * len(fleet.instances)
        self._seen = [-1] * len(fleet.instances)  # changes of each instance when it was last looked at
        if self._period:
            self._alarm = Alarm(env, SAMPLE, lambda _: self._tick())
            self._alarm.set(0)

    def refresh(self) -> None:
        """Deliver what has arrived by now."""
        now: int = self._env.now
        if not self._period:
            for report in self._sample():
                self._deliver(report)
            return
        while self._under_way and self._under_way[0][0] <= now:
            for report in self._under_way.popleft()[1]:
                self._deliver(report)

    def _tick(self) -> None:
        now: int = self._env.now
        if reports := self._sample():
            self._under_way.append((now + self._delay, reports))
        self._alarm.set(now + self._period)

    def _all(self) -> list[Report]:
        """Of the instances with news."""
        now: int = self._env.now
        reports = []
        for i, instance in enumerate(self._fleet.instances):
            if instance.quiet and instance.changes == self._seen[i]:
                continue
            self._seen[i] = instance.changes
            instance.sync(now)
            chains = _changed(instance.cache)
            load = instance.running, len(instance.waiting), instance.free_blocks(), *instance.queued(now)
            if chains or load != self._last[i]:
                reports.append(Report(i, to_s(now), *load, chains))
                self._last[i] = load
        return reports

    def _chains(self) -> list[Report]:
        """Of the instances whose chains changed."""
        now: int = self._env.now
        reports = []
        for i, instance in enumerate(self._fleet.instances):
            if instance.storing:
                instance.sync(now)
            if instance.cache.dirty:
                reports.append(Report(i, to_s(now), 0, 0, 0, 0, 0, _changed(instance.cache)))
        return reports


def _changed(cache: ChainCache) -> tuple[tuple[int, int], ...]:
    if not (dirty := cache.dirty):
        return ()
    chains = tuple([(chain, cache.stored_of(chain)) for chain in sorted(dirty)])
    dirty.clear()
    return chains
