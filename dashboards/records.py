"""A run's records as far as its trace goes: whole, killed, still being written, or simulated a moment ago."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from forge import trace as ev
from forge.metrics import LawCheck, RunFold, figures
from forge.metrics.stats import Array
from forge.queue import QueueError
from forge.scenario import Scenario
from forge.types import ForgeError, Json

#: what folding raises where an event is one by its keys and not by its values
MISFITS = (TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError, OverflowError, QueueError)


@dataclass(slots=True)
class Flights:
    """Requests under way by instance over time, and when instances were down; folded from events."""

    times: array[float] = field(default_factory=lambda: array("d"))
    instances: array[int] = field(default_factory=lambda: array("q"))
    changes: array[int] = field(default_factory=lambda: array("q"))  # +1: routed there; -1: left it
    downs: list[tuple[int, float, float | None]] = field(default_factory=list)  # instance, from, to (None: still)
    _at: dict[str, int] = field(default_factory=dict)  # instance by request under way

    def apply(self, event: ev.Event) -> None:
        match event:
            case ev.Routed():
                if event.request in self._at:  # sent again under its name
                    self._change(event.t, self._at[event.request], -1)
                self._at[event.request] = event.instance
                self._change(event.t, event.instance, 1)
            case ev.Completed():
                if (instance := self._at.pop(event.request, None)) is not None:
                    self._change(event.t, instance, -1)
            case ev.InstanceDown():
                self.downs.append((event.instance, event.t, None))
            case ev.InstanceUp():
                self.downs = [
                    (i, start, event.t) if i == event.instance and end is None else (i, start, end)
                    for i, start, end in self.downs
                ]
            case ev.Resumed():
                for instance in self._at.values():
                    self._change(event.t, instance, -1)
                self._at.clear()
                self.downs = [(i, start, event.t if end is None else end) for i, start, end in self.downs]

    def _change(self, t: float, instance: int, by: int) -> None:
        self.times.append(t)
        self.instances.append(instance)
        self.changes.append(by)


@dataclass(slots=True)
class Records:
    """Everything that pages show of one run. Feed it every event in order. `hits`: None where there are no tiers."""

    scenario: Scenario
    run: RunFold = field(default_factory=RunFold)
    laws: LawCheck = field(init=False)
    flights: Flights = field(default_factory=Flights)
    hits: ev.KvHits | None = None
    events: int = 0
    _summary: tuple[int, Json] | None = None  # of how many events, and what it was

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.laws = LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)

    def apply(self, event: ev.Event) -> None:
        self.events += 1
        self.run.apply(event)
        self.laws.apply(event)
        self.beside(event)

    def beside(self, event: ev.Event) -> None:
        """What neither the fold nor the laws keep."""
        if isinstance(event, ev.KvHits):
            self.hits = event
        self.flights.apply(event)

    @property
    def window(self) -> int | None:
        return self.scenario.shape().window

    @property
    def wall_s(self) -> float:
        """Never 0, so that an axis has a length."""
        return self.run.wall_s or 1.0

    def summary(self) -> Json:
        """The content of `summary.json` so far."""
        if self._summary is None or self._summary[0] != self.events:
            self._summary = self.events, figures(self.run, self.laws, self.scenario)
        return self._summary[1]


class Follower:
    """A trace file and its records. `held` folds what was written since it was last asked, by whoever asked: tabs share
    one follower. A file that shrank is another run's: it is read from its beginning."""

    def __init__(self, path: Path, scenario: Scenario) -> None:
        self.path = path
        self._scenario = scenario
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._tail = ev.Tail(self.path, calls=False)
        self._records = Records(self._scenario)
        self._size = 0

    @contextmanager
    def held(self) -> Iterator[Records]:
        """The records as they are now; nobody adds to them meanwhile. Raises ForgeError, naming file and line, for what
        is no trace, or none that any run could have made."""
        with self._lock:
            size = self.path.stat().st_size if self.path.is_file() else 0
            if size < self._size:
                self._begin()
            self._size = size
            self._fold()
            self._records.events = self._tail.number
            yield self._records

    def _fold(self) -> None:
        try:
            for event in self._tail.new():
                self._records.apply(event)
        except ForgeError:
            self._begin()
            raise
        except MISFITS as error:
            line = self._tail.number
            self._begin()
            raise ForgeError(f"{self.path}:{line}: an event that fits no run ({error})") from None


@contextmanager
def held(followers: Mapping[str, Follower]) -> Iterator[dict[str, Records]]:
    """The records of several, locked in one order whoever asks, so that nobody waits for ever."""
    found: dict[str, Records] = {}
    with ExitStack() as stack:
        for name, follower in sorted(followers.items(), key=lambda pair: str(pair[1].path)):
            found[name] = stack.enter_context(follower.held())
        yield {name: found[name] for name in followers}


def in_flight(flights: Flights, count: int, grid: Array) -> Array:
    """Requests under way at every instance [count, grid] at every time of `grid`."""
    times, where, change = (np.array(one) for one in (flights.times, flights.instances, flights.changes))
    found = np.zeros((count, len(grid)))
    for i in range(count):
        mine = where == i
        levels = np.concatenate([[0], np.cumsum(change[mine])])
        found[i] = levels[np.searchsorted(times[mine], grid, side="right")]
    return found
