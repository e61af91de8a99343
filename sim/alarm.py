"""A SimPy event that rings again and again: one object where a new event each time would cost more than its work."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

#: Priorities at one instant (HAPPEN is SimPy's NORMAL): what happens is seen by samplers of state before instances
#: plan, and instances plan once every arrival of their instant is in.
HAPPEN, SAMPLE, PLAN = 1, 2, 3
_FIRST = 0


class Alarm:
    """Rings at every time it is `set` to. A later `set` does not take back an earlier one: whoever listens checks.
    `about`: for whoever listens, who is given the alarm."""

    __slots__ = ("_callbacks", "_env", "_priority", "about")

    _ok = True  # as SimPy's loop asks of an event
    _defused = True
    _value = None

    def __init__(self, env: Any, priority: int, ring: Callable[[Any], None], about: Any = None) -> None:
        self._env = env
        self._priority = priority
        self._callbacks = (ring,)
        self.about = about

    @property
    def callbacks(self) -> tuple[Callable[[Any], None], ...]:
        return self._callbacks

    @callbacks.setter
    def callbacks(self, _: None) -> None:
        """SimPy's loop takes an event's callbacks away; these stay."""

    def set(self, at: int) -> None:
        """What `Environment.schedule` does, for an absolute time that may not be before now."""
        env = self._env
        heappush(env._queue, (at, self._priority, next(env._eid), self))


class Later:
    """Alarms mostly far ahead, such as tools that work and limits that end: they enter SimPy's heap when their slot of
    `width` femtoseconds begins. Where tens of thousands wait, that keeps the heap at what is near; the order in which
    alarms ring is the same."""

    __slots__ = ("_env", "_slots", "_width")

    def __init__(self, env: Any, width: int) -> None:
        self._env = env
        self._width = width
        self._slots: dict[int, list[Any]] = {}  # those that have not begun

    def add(self, at: int, ring: Callable[[Any], None], about: Any) -> None:
        """A new alarm of priority HAPPEN, set to `at`."""
        env = self._env
        alarm, slot = Alarm(env, HAPPEN, ring, about), at // self._width
        if slot <= env.now // self._width:
            alarm.set(at)
            return
        entry = (at, HAPPEN, next(env._eid), alarm)
        if slot in self._slots:
            self._slots[slot].append(entry)
        else:
            self._slots[slot] = [entry]
            Alarm(env, _FIRST, self._open, slot).set(slot * self._width)

    def _open(self, alarm: Alarm) -> None:
        queue = self._env._queue
        for entry in self._slots.pop(alarm.about):
            heappush(queue, entry)
