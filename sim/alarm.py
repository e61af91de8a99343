"""A SimPy event that rings again and again: one object where a new event each time would cost more than its work."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

#: Priorities at one instant (HAPPEN is SimPy's NORMAL): what happens is seen by samplers of state before instances
#: plan, and instances plan once every arrival of their instant is in.
HAPPEN, SAMPLE, PLAN = 1, 2, 3


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
