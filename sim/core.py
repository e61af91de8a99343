"""One processor that everybody's work shares: the gateway and the agents of a live run are event loops, which advance
all requests at hand by turns. So what comes together leaves together, much later, and an engine has nothing to do
meanwhile: 192 agents started at once sent nothing for 1.1 s and all their requests in the next 0.1 s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from sim.alarm import HAPPEN, Alarm
from sim.clock import to_fs


class Shared:
    """Processor sharing of equal jobs, which therefore leave in the order they came. Times in whole femtoseconds.

    `done` is what each job present has received since the clock began: time divided by the jobs at hand.
    """

    def __init__(self, work: int) -> None:
        self._work = work
        self._ends: deque[int] = deque()  # `done` at which each job is
        self._done = self._at = 0

    def add(self, now: int) -> None:
        """A job arrives. All that leaves before must have been taken."""
        self._advance(now)
        self._ends.append(self._done + self._work)

    def due(self) -> int | None:
        """When the first job leaves if none comes before."""
        if not self._ends:
            return None
        return self._at + (self._ends[0] - self._done) * len(self._ends)

    def take(self) -> None:
        """The first job leaves, at `due()`."""
        due = self.due()
        assert due is not None
        self._at, self._done = due, self._ends.popleft()

    def _advance(self, now: int) -> None:
        if self._ends:
            self._done = min(self._ends[0], self._done + (now - self._at) // len(self._ends))
        self._at = now


class Core:
    """The shared processor in simulated time. Half of `work_s` seconds comes before a request, and then a fixed
    latency; the other half comes after its answer."""

    def __init__(self, env: Any, work_s: float, latency_s: float) -> None:
        self._env = env
        self._latency = to_fs(latency_s)
        self._shared = Shared(to_fs(work_s / 2))
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()  # (latency, what follows)
        self._alarm = Alarm(env, HAPPEN, lambda _: self._ring())

    def before(self, then: Callable[[], None]) -> None:
        """The work before a request begins; `then` is called when the request may leave."""
        self._run(self._latency, then)

    def after(self, then: Callable[[], None]) -> None:
        """The work after an answer begins; `then` is called when it is done."""
        self._run(0, then)

    def _run(self, latency: int, then: Callable[[], None]) -> None:
        self._shared.add(self._env.now)
        self._jobs.append((latency, then))
        self._set()

    def _set(self) -> None:
        due = self._shared.due()
        if due is not None:
            self._alarm.set(due)

    def _ring(self) -> None:
        if self._shared.due() != self._env.now:
            return  # put off by a job that came
        self._shared.take()
        latency, then = self._jobs.popleft()
        self._set()
        if latency:
            Alarm(self._env, HAPPEN, lambda _: then()).set(self._env.now + latency)
        else:
            then()
