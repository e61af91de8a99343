"""Long runs: figures folded while the simulation goes on, no event kept. A million samples fit in a few GB."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from forge import trace as ev
from forge.control import Served, Sink
from forge.metrics import LawCheck, RunFold, figures
from forge.scenario import Scenario
from forge.types import Json
from sim.work import Work
from sim.world import simulate

CALLS = 16  # answered between two words on how far a run is


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: items submitted of those it ends with (None: it ends by something else), calls answered, the
    simulated clock, and calls/s of wall time so far."""

    items: int
    of: int | None
    calls: int
    clock_s: float
    calls_per_s: float


@dataclass(frozen=True, slots=True)
class Streamed:
    """A finished run: what the report needs. `cpu_s` of this process."""

    scenario: Scenario
    run: RunFold
    laws: LawCheck
    cpu_s: float

    @property
    def calls(self) -> int:
        return self.run.calls

    def summary(self) -> Json:
        return figures(self.run, self.laws, self.scenario)


def stream(
    scenario: Scenario,
    work: Work | None = None,
    progress: Callable[[Progress], None] | None = None,
    sinks: tuple[Sink, ...] = (),
) -> Streamed:
    """`simulate`, with the summary that folding its events would give. `progress` is told when an item is submitted or
    ends, every CALLS calls, and last when the run ends."""
    run = RunFold()
    laws = LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)
    watch = None if progress is None else _Watch(scenario, run, progress)
    watches: tuple[Sink, ...] = () if watch is None else (watch,)
    cpu = time.process_time()
    served = run.served if watch is None else watch.served
    simulate(scenario, (run.apply, laws.apply, *watches, *sinks), work, requests=served)
    return Streamed(scenario, run, laws, time.process_time() - cpu)


class _Watch:
    """A sink, and what requests are told to: passes them on to the fold."""

    def __init__(self, scenario: Scenario, run: RunFold, tell: Callable[[Progress], None]) -> None:
        self._of = scenario.stop.items
        self._run = run
        self._tell = tell
        self._began = time.monotonic()

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Submitted | ev.Finished | ev.Dead | ev.RunEnded):
            self._say(event.t)

    def served(self, request: Served) -> None:
        self._run.served(request)
        if self._run.calls % CALLS == 0:
            self._say(request.ended_s)

    def _say(self, clock_s: float) -> None:
        calls = self._run.calls
        rate = calls / max(1e-9, time.monotonic() - self._began)
        self._tell(Progress(len(self._run.items), self._of, calls, clock_s, rate))
