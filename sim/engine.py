"""A rollout instance: continuous batching at the level of iterations, jumped over analytically.

Every iteration gives each running row one token. A request joins at an iteration boundary while a slot is free,
first come first served; the iteration that prefills its prompt also samples its first token. Nothing changes inside
a *span* of iterations with the same rows, so the instance plans one span at a time and only its end is an event.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from forge.sections import Sim
from sim.clock import to_ns


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds an iteration takes (`forge.scenario.Sim`)."""

    step_s: float
    row_s: float
    prefill_token_s: float

    @classmethod
    def of(cls, sim: Sim) -> Cost:
        return cls(sim.step_s, sim.row_s, sim.prefill_token_s)

    def iteration_ns(self, rows: int, prefill_tokens: int) -> int:
        return max(1, to_ns(self.step_s + self.row_s * rows + self.prefill_token_s * prefill_tokens))


@dataclass(slots=True, eq=False)
class Request:
    """One completion to sample. `tokens` is the hidden truth, read by the instance alone."""

    id: str
    prefill_tokens: int
    tokens: int
    sampled: int = 0
    versions: tuple[int, int] = (0, 0)  # first and last weights version that sampled a token
    cancelled: bool = False
    joined: int = -1  # iterations the instance had done when it joined; -1: waiting


@dataclass(slots=True)
class Progress:
    """What one `advance` brought about, in this order."""

    first_tokens: list[Request] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    loaded: int | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A weights version to load. `drain`: admit nobody and wait until no row runs."""

    version: int
    ns: int
    drain: bool


@dataclass(slots=True)
class Counters:
    """What `Usage` events report, over complete iterations."""

    busy_ns: int = 0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class Instance:
    """Pure state machine in nanoseconds. The owner calls `advance(now)` exactly at `due()`, after all else of then.

    An iteration that has begun is never changed: arrivals, cancellations and loads take effect at its end.
    """

    def __init__(self, cost: Cost, slots: int) -> None:
        self.version = 0
        self._cost = cost
        self._slots = slots
        self._waiting: deque[Request] = deque()
        self._rows: list[tuple[int, int, Request]] = []  # heap: (iteration it ends with, order, request)
        self._joining: list[Request] = []  # rows that get their first token in this span
        self._order = 0
        self._cancelling = False
        self._pending: Load | None = None
        self._loading: Load | None = None
        self._counters = Counters()
        # The span: it began at `_at` with `_done` iterations done, and has `_length` of `_each` ns. Length 0: idle.
        self._at = 0
        self._done = 0
        self._each = 0
        self._length = 0

    # --- what happens to it ------

    def add(self, request: Request, now: int) -> None:
        self._waiting.append(request)
        if len(self._rows) < self._slots:
            self._change(now)

    def cancel(self, request: Request, now: int) -> bool:
        """True where the request was still waiting and is gone at once; else it ends with the iteration under way."""
        if request.joined < 0:
            self._waiting.remove(request)
            return True
        request.cancelled = self._cancelling = True
        self._change(now)
        return False

    def load(self, load: Load, now: int) -> None:
        """Load between two iterations; running rows go on with their KV afterwards."""
        self._pending = load
        self._change(now)

    def crash(self, now: int) -> list[Request]:
        """Everything under way is lost; returns it in order of arrival."""
        self._counters = self.usage(now)
        lost = [row[2] for row in sorted(self._rows, key=lambda row: row[1])] + list(self._waiting)
        self._rows, self._waiting, self._joining = [], deque(), []
        self._pending = self._loading = None
        self._at, self._length = now, 0
        return lost

    # --- time ------

    def due(self) -> int | None:
        """When to call `advance` next (ns); None: nothing to do."""
        if self._loading is not None:
            return self._at + self._loading.ns
        if self._length:
            return self._at + self._each * self._length
        return self._at if self._waiting or self._pending else None

    def advance(self, now: int) -> Progress:
        progress = Progress()
        if self._loading is not None:
            self.version = progress.loaded = self._loading.version
            self._loading = None
        elif self._length:
            self._end_span(now, progress)
        self._plan(now)
        return progress

    def usage(self, now: int) -> Counters:
        """Counters with the complete iterations of the span under way."""
        base = self._counters
        done = min(self._length, (now - self._at) // self._each) if self._length else 0
        prefilled = sum(r.prefill_tokens for r in self._joining) if done else 0
        return Counters(
            busy_ns=base.busy_ns + done * self._each,
            steps=base.steps + done,
            prefill_tokens=base.prefill_tokens + prefilled,
            decode_tokens=base.decode_tokens + done * len(self._rows),
        )

    # --- inside ------

    def _change(self, now: int) -> None:
        """Something waits for the next boundary: end the span there."""
        if self._loading is not None:
            return
        if not self._length:
            self._at = now
            return
        self._length = min(self._length, max(1, -(-(now - self._at) // self._each)))

    def _end_span(self, now: int, progress: Progress) -> None:
        self._counters = self.usage(now)
        self._done += self._length
        for request in self._joining:
            request.versions = (self.version, self.version)
        progress.first_tokens = self._joining
        while self._rows and self._rows[0][0] == self._done:
            self._end(heappop(self._rows)[2], progress)
        if self._cancelling:
            self._end_cancelled(progress)

    def _end_cancelled(self, progress: Progress) -> None:
        self._cancelling = False
        for row in sorted(self._rows, key=lambda row: row[1]):
            if row[2].cancelled:
                self._end(row[2], progress)
        self._rows = [row for row in self._rows if not row[2].cancelled]
        heapify(self._rows)

    def _end(self, request: Request, progress: Progress) -> None:
        request.sampled = self._done - request.joined
        request.versions = (request.versions[0], self.version)
        progress.ended.append(request)

    def _plan(self, now: int) -> None:
        self._at, self._length, self._joining = now, 0, []
        pending = self._pending
        if pending is not None and not (pending.drain and self._rows):
            self._loading, self._pending = pending, None
            return
        if pending is None:
            self._admit()
        if self._rows:
            self._each = self._cost.iteration_ns(len(self._rows), sum(r.prefill_tokens for r in self._joining))
            self._length = 1 if self._joining else self._rows[0][0] - self._done

    def _admit(self) -> None:
        while self._waiting and len(self._rows) < self._slots:
            request = self._waiting.popleft()
            request.joined = self._done
            heappush(self._rows, (self._done + request.tokens, self._order, request))
            self._order += 1
            self._joining.append(request)
