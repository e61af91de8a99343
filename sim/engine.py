"""A rollout instance at the level of iterations: what happens to it, and when it is due.

What it plans at a boundary is `sim.plan`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from forge.instances import pairs
from forge.policies.sync import SyncMode
from forge.types import ForgeError
from sim.iteration import Times
from sim.kv import Spill
from sim.plan import Planner
from sim.request import Request
from sim.sessions import Path
from sim.shape import Shape

__all__ = ["Counters", "Instance", "Load", "Shape"]


@dataclass(frozen=True, slots=True)
class Load:
    """A weights version to load, taking `fs`. `in_flight`: running requests keep their KV. `drain`: nobody is admitted
    until none runs. `abort`: they wait again, in front, and compute their KV anew."""

    version: int
    fs: int
    mode: SyncMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Over complete iterations. `spans`: plans carried out. `sampled_tokens`: first ones included."""

    busy_fs: int
    iterations: int
    spans: int
    prefill_tokens: int
    sampled_tokens: int
    preemptions: int


class Instance(Planner):
    """Pure state machine in femtoseconds. The owner calls `advance(now)` exactly at `due()`, after all else of then,
    and reads what came of it: `first_tokens`, `ended`, `loaded`, in this order.

    An iteration that has begun is never changed: arrivals, cancellations and loads take effect at its end.
    """

    def __init__(self, times: Times, shape: Shape, *, listen: bool = False, spill: Spill | None = None) -> None:
        super().__init__(times, shape, listen, spill)
        self.loaded: int | None = None
        self.changes = 0  # of whatever a report says; while `quiet` it changes with nothing else
        self._busy_fs = self._iterations = self._spans = self._prefilled = 0
        self._pending: Load | None = None
        self._loading: Load | None = None
        self._cancelling = False

    # --- what happens to it ------

    def check(self, request: Request) -> None:
        """Raises ForgeError where the request could never run here."""
        over = -(-self._times.line(1)[2] // self._times.unit) - 1  # tokens that its last step may sample beyond its end
        blocks = -(-(request.prompt + request.output + over) // self._shape.block)
        if blocks > self._shape.capacity:
            raise ForgeError(
                f"request {request.id}: {request.prompt} + {request.output} tokens take {blocks} KV blocks, more than "
                f"the {self._shape.capacity} of an instance"
            )

    def add(self, request: Request, now: int) -> None:
        self.waiting.append(request)
        self.changes += 1
        span = self._span
        if not span.length:
            if self._loading is None:
                span.at = now
        elif (
            span.length > 1
            and len(self.waiting) == 1
            and self._pending is None
            and self._decodes.count < self._shape.seats
        ):
            span.cut(now, 1 if request.ready else self._full)

    def cancel(self, request: Request, now: int) -> bool:
        """True where the request was still waiting and is gone at once; else it ends with the iteration under way."""
        self._change(now)
        if request.order < 0:
            self.waiting.remove(request)
            self.changes += 1
            return True
        request.cancelled = self._cancelling = True
        return False

    def load(self, load: Load, now: int) -> None:
        self._pending = load
        self._change(now)

    def crash(self, now: int) -> list[Request]:
        """Everything is lost; returns what was under way in order of arrival, to be sent again as it was."""
        if k := self._span.complete(now):
            self._count(k, self._span.end_of(k))
        chunked = [request for request, _ in self._chunks]
        if self._prefilling is not None and not chunked:
            chunked = [self._prefilling]
        lost = [*self._decodes.all(), *chunked, *self.waiting]
        for request in lost:
            request.order = -1
        self._pending = self._loading = None
        self._cancelling = False
        self.changes += 1
        self._clear(now)
        return lost

    def let_go(self, request: Request, now: int) -> None:
        """Free the KV of an ended request that holds on to it."""
        self.sync(now)
        self.changes += 1
        self.memory.release(request, keep=False)
        if self.waiting:
            self._change(now)

    def insert(self, path: Path, blocks: int, now: int) -> None:
        """The path's first `blocks` arrived from elsewhere; they are kept if there is room."""
        self.sync(now)
        self.changes += 1
        memory, cache = self.memory, self.cache
        new = blocks - cache.match(path)
        if 0 < new <= memory.room() - cache.loose_on(path):
            held = cache.hold(path)
            memory.evict(new)
            cache.release(held)
            cache.insert(path, blocks)
            self._change(now)

    def forget(self, chains: list[int], now: int) -> None:
        """Nobody is expected to come back to these: they are evicted first."""
        cache = self.cache
        here = [chain for chain in chains if chain in cache.entries]
        if here:
            self.sync(now)
            for chain in here:
                cache.forget(chain)

    def _change(self, now: int) -> None:
        """Something waits for the next boundary."""
        if self._span.length:
            self._span.cut(now)
        elif self._loading is None:
            self._span.at = now

    # --- time ------

    def due(self) -> int | None:
        """When to call `advance` next; None: nothing to do."""
        span = self._span
        if self._loading is not None:
            return span.at + self._loading.fs
        if span.length:
            return span.end
        return span.at if self.waiting or self._pending else None

    def advance(self, now: int) -> None:
        if self.first_tokens:
            self.first_tokens = []
        if self.ended:
            self.ended = []
        self.loaded = None
        self.changes += 1
        if self._loading is not None:
            self.version = self.loaded = self._loading.version
            self._loading = None
        elif self._span.length:
            self._count(self._span.length, now)
            self._finish()
        if self._cancelling:
            self._end_cancelled()
        self._reset(now)
        if self._pending is None:
            self._plan(admit=True)
        elif not self._begin_load(self._pending):
            self._plan(admit=False)

    def sync(self, now: int) -> None:
        """Bring `cache` to what it holds at `now`; inside a span it lags behind."""
        if not self.quiet and self._span.length:
            self._take(self._span.begun_before(now))

    def free_blocks(self) -> int:
        """Free or evictable, after `sync`."""
        return self.memory.room()

    def queued(self, now: int) -> tuple[int, int]:
        """Prompt tokens that it has yet to compute, after `sync`, and the (query, key) pairs of their attention: of who
        waits, and of the prompts under way."""
        block, cache = self._shape.block, self.cache
        tokens = of_all = 0
        for request in self.waiting:
            if not request.ready:
                target = request.prompt + request.sampled
                missing = target - min(cache.match(request.path), (target - 1) // block) * block
                tokens += missing
                of_all += pairs(missing, target)
        chunks = self._chunks
        if len(chunks) == 1:
            missing = self._left - min(self._span.complete(now) * self._each, self._left)
            tokens += missing
            of_all += pairs(missing, chunks[0][0].target)
        else:
            for request, chunk in chunks:
                missing = request.target - request.kv + chunk
                tokens += missing
                of_all += pairs(missing, request.target)
        return tokens, of_all

    def usage(self, now: int) -> Counters:
        """Counters with the complete iterations of the span under way."""
        k, span = self._span.complete(now), self._span
        return Counters(
            busy_fs=self._busy_fs + (span.end_of(k) - span.at if k else 0),
            iterations=self._iterations + k,
            spans=self._spans,
            prefill_tokens=self._prefilled + min(k * self._each, self._left),
            sampled_tokens=(self._sampled + k * self._decodes.count * self._gain) // self._decodes.unit,
            preemptions=self._preemptions,
        )

    def _count(self, k: int, until: int) -> None:
        """The span's first k iterations are complete at `until`."""
        self._busy_fs += until - self._span.at
        self._iterations += k
        self._spans += 1
        self._sampled += k * self._decodes.count * self._gain
        self._prefilled += min(k * self._each, self._left)

    # --- what waited for a boundary ------

    def _begin_load(self, load: Load) -> bool:
        """False: not yet."""
        if load.mode == "drain" and self.running:
            return False
        if load.mode == "abort":
            while self._preempt():
                pass
        self._loading, self._pending = load, None
        self.memory.renew(self._prefilling)
        return True

    def _end_cancelled(self) -> None:
        self._cancelling = False
        gone = [request for request in self._decodes.all() if request.cancelled]
        for request in gone:
            self._decodes.remove(request)
        if self._prefilling is not None and self._prefilling.cancelled:
            gone.append(self._prefilling)
            self._prefilling = None
        for request in gone:
            self._end(request)
