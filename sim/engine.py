"""A rollout instance at the level of iterations: continuous batching, chunked prefill, paged KV, preemption.

Every iteration gives each decoding request a token and spends what is left of a token budget on prompts, first come
first served. Nothing changes inside a *span* of iterations with the same batch, so the instance plans one span at a
time and only its end is an event: all iterations until a decoding request ends or memory runs out, all full chunks of
one long prompt, or a single mixed iteration. Times are integers, so a span ends exactly where stepping would.

A plan, in this order: running requests take the blocks of their next token, preempting the youngest where there is no
room; the prompt under way takes its chunk; then, unless somebody was preempted, the queue is admitted in order while
budget, seats and memory last. `ENGINE.md` beside this file is the whole contract; `tests/sim/engine_oracle.py` says the
same once more, block by block.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from forge.types import ForgeError
from sim.iteration import Times
from sim.kv import ChainCache, Spill
from sim.memory import Memory
from sim.request import Request
from sim.sessions import Path
from sim.span import Span

LoadMode = Literal["in_flight", "drain", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`block` tokens a KV block, `capacity` in blocks, `budget` tokens an iteration, `seats` requests at once.

    `jump` False plans one iteration at a time: the same model, stepped.
    """

    block: int = 16
    capacity: int
    budget: int = 8192
    seats: int = 256
    jump: bool = True

    def __post_init__(self) -> None:
        if min(self.block, self.capacity, self.seats) < 1:
            raise ForgeError(f"block, capacity, seats = {self.block}, {self.capacity}, {self.seats}: must be positive")
        if self.budget <= self.seats:
            raise ForgeError(f"budget = {self.budget}: must exceed seats = {self.seats}, or no prompt is ever computed")


@dataclass(frozen=True, slots=True)
class Load:
    """A weights version to load, taking `fs`. `in_flight`: running requests keep their KV. `drain`: nobody is admitted
    until none runs. `abort`: they wait again, in front, and compute their KV anew."""

    version: int
    fs: int
    mode: LoadMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Over complete iterations. `spans`: plans carried out. `sampled_tokens`: first ones included."""

    busy_fs: int
    iterations: int
    spans: int
    prefill_tokens: int
    sampled_tokens: int
    preemptions: int


class Instance:
    """Pure state machine in femtoseconds. The owner calls `advance(now)` exactly at `due()`, after all else of then,
    and reads what came of it: `first_tokens`, `ended`, `loaded`, in this order.

    An iteration that has begun is never changed: arrivals, cancellations and loads take effect at its end.
    """

    def __init__(self, times: Times, shape: Shape, *, listen: bool = False, spill: Spill | None = None) -> None:
        self.version = 0
        self.waiting: deque[Request] = deque()
        self.first_tokens: list[Request] = []
        self.ended: list[Request] = []
        self.loaded: int | None = None
        self.changes = 0  # of whatever a report says; while `quiet` it changes with nothing else
        self.quiet = True  # no block is taken until the span ends
        self._times = times
        self._shape = shape
        self._listen = listen
        self._spill = spill
        self._orders = 0
        self._busy_fs = self._iterations = self._spans = self._prefilled = self._sampled = self._preemptions = 0
        self._pending: Load | None = None
        self._loading: Load | None = None
        self._cancelling = False
        self._clear(0)

    def _clear(self, now: int) -> None:
        """Nothing is here."""
        shape = self._shape
        self.memory = Memory(shape.block, shape.capacity, self._times.unit, self._listen, self._spill)
        self._decodes = self.memory.decodes
        self._prefilling: Request | None = None  # the prompt under way, the youngest of all that run
        self._span = Span()
        self._span.at = now
        self._gain = 0  # units a decoding request samples in an iteration of the span
        self._begun = 0  # iterations of the span whose blocks are taken
        self._chunks: list[tuple[Request, int]] = []  # of the first iteration, or the one of every iteration

    # --- what happens to it ------

    @property
    def cache(self) -> ChainCache:
        return self.memory.cache

    @property
    def running(self) -> int:
        return self._decodes.count + (len(self._chunks) or (self._prefilling is not None))

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
            and (request.ready or not self._chunks)
            and len(self.waiting) == 1
            and self._pending is None
            and self._decodes.count < self._shape.seats
        ):
            span.cut(now)

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
        self.waiting = deque()
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
        memory, cache = self.memory, self.memory.cache
        new = blocks - cache.match(path)
        if 0 < new <= memory.room() - cache.loose_on(path):
            held = cache.hold(path)
            memory.evict(new)
            cache.release(held)
            cache.insert(path, blocks)
            self._change(now)

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
        self.first_tokens, self.ended, self.loaded = [], [], None
        self.changes += 1
        if self._loading is not None:
            self.version = self.loaded = self._loading.version
            self._loading = None
        elif self._span.length:
            self._end_span()
        if self._cancelling:
            self._end_cancelled()
        self._plan(now)

    def sync(self, now: int) -> None:
        """Bring `cache` to what it holds at `now`; inside a span it lags behind."""
        if self._span.length > 1 and not self.quiet:
            self._take(self._span.begun_before(now))

    def free_blocks(self) -> int:
        """Free or evictable, after `sync`."""
        return self.memory.room()

    def usage(self, now: int) -> Counters:
        """Counters with the complete iterations of the span under way."""
        k, span = self._span.complete(now), self._span
        return Counters(
            busy_fs=self._busy_fs + (span.end_of(k) - span.at if k else 0),
            iterations=self._iterations + k,
            spans=self._spans,
            prefill_tokens=self._prefilled + k * sum(tokens for _, tokens in self._chunks),
            sampled_tokens=(self._sampled + k * self._decodes.count * self._gain) // self._decodes.unit,
            preemptions=self._preemptions,
        )

    def _change(self, now: int) -> None:
        """Something waits for the next boundary."""
        if self._span.length:
            self._span.cut(now)
        elif self._loading is None:
            self._span.at = now

    def _take(self, begun: int) -> None:
        """The first `begun` iterations of the span have taken their blocks."""
        more, memory = begun - self._begun, self.memory
        if more <= 0:
            return
        self._begun = begun
        memory.planned = self._decodes.done + begun * self._gain
        if self._span.ends:
            request, tokens = self._chunks[0]
            memory.place(request, request.kv + more * tokens)
        else:
            memory.evict()

    # --- the end of a span ------

    def _count(self, k: int, until: int) -> None:
        """The span's first k iterations are complete at `until`."""
        self._busy_fs += until - self._span.at
        self._iterations += k
        self._spans += 1
        self._sampled += k * self._decodes.count * self._gain
        for _, tokens in self._chunks:
            self._prefilled += k * tokens

    def _end_span(self) -> None:
        span, decodes = self._span, self._decodes
        length = span.length
        if length > 1 and not self.quiet:
            self._take(length)
        self._count(length, span.end)
        if decodes.count:
            grown = length * self._gain
            decodes.done += grown
            decodes.context += grown * decodes.count
            if decodes.done >= decodes.next_end:
                for request in decodes.ended():
                    self._end(request)
        span.length = 0
        for request, _ in self._chunks:
            if request.kv == request.target:
                self._end_prefill(request)

    def _end_prefill(self, request: Request) -> None:
        """Its last chunk sampled a token."""
        if request is self._prefilling:
            self._prefilling = None
        if not request.sampled:
            request.versions = (self.version, self.version)
            self.first_tokens.append(request)
        request.sampled += 1
        self._sampled += self._decodes.unit
        if request.sampled == request.output:
            self._end(request)
        else:
            self.memory.decode(request)

    def _end(self, request: Request) -> None:
        request.versions = (request.versions[0], self.version)
        self.ended.append(request)
        if request.hold and not request.cancelled:
            request.order = -1
        else:
            self.memory.release(request, request.keep and not request.cancelled)

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

    # --- the plan ------

    def _plan(self, now: int) -> None:
        span, decodes, memory = self._span, self._decodes, self.memory
        span.at, span.length, self._begun, self.quiet = now, 0, 0, True
        if self._chunks:
            self._chunks, span.ends = [], []
        memory.planned = decodes.done
        if self._pending is not None and self._begin_load(self._pending):
            return
        if self.waiting and self.waiting[0].ready and self._pending is None:
            self._admit_ready()
        span.a, span.b, self._gain = self._times.line(decodes.count)
        self._begun = 1
        memory.planned = decodes.done + self._gain
        preempted = decodes.count > 0 and not memory.evict() and self._make_room()
        budget = self._shape.budget - decodes.count
        if self._prefilling is not None:
            budget -= self._continue(self._prefilling, budget)
        if self.waiting and not preempted and self._pending is None:
            self._admit(budget)
        if self._chunks:
            self._span_of_chunks()
        elif decodes.count:
            span.context, span.grown = decodes.context, decodes.count * self._gain
            # Who gave way to steps of several tokens may fit again as a prompt: seen at the next boundary.
            again = preempted and self._gain > decodes.unit
            span.set(self._decode_iterations() if self._shape.jump and not again else 1)
        elif self._prefilling is not None:
            self._preempt()  # alone and without room: an answer was put on a chain of its path; it begins again

    def _begin_load(self, load: Load) -> bool:
        if load.mode == "drain" and self.running:
            return False
        if load.mode == "abort":
            while self._preempt():
                pass
        self._loading, self._pending = load, None
        self.memory.renew(self._prefilling)
        return True

    def _make_room(self) -> bool:
        """The youngest give way until the others' next tokens fit. True: somebody was preempted."""
        memory, decodes = self.memory, self._decodes
        preempted = False
        while memory.room() < 0 and self._preempt():
            preempted = True
            self._span.a, self._span.b, self._gain = self._times.line(decodes.count)
            memory.planned = decodes.done + self._gain
        memory.evict()
        return preempted

    def _preempt(self) -> bool:
        """The youngest waits again, in front, and has to compute all it had anew. False: nobody runs."""
        request = self._prefilling
        if request is not None:
            self._prefilling = None
        elif self._decodes.count:
            request = self._decodes.all()[-1]
            self._decodes.remove(request)
        else:
            return False
        self.memory.release(request, keep=False)
        request.preemptions += 1
        request.ready = False
        self._preemptions += 1
        self.waiting.appendleft(request)
        return True

    def _continue(self, request: Request, budget: int) -> int:
        """The prompt under way takes its chunk, as large as fits; returns its tokens."""
        tokens, memory = min(request.target - request.kv, budget), self.memory
        if not memory.fits(tokens // memory.block + 1):
            held = -(-request.kv // memory.block)
            tokens = min(tokens, (memory.room() + held) * memory.block - request.kv)
        if tokens > 0:
            memory.place(request, request.kv + tokens)
            self._chunks.append((request, tokens))
        return tokens

    def _admit(self, budget: int) -> None:
        waiting, memory, cache = self.waiting, self.memory, self.memory.cache
        block = memory.block
        seats = self._shape.seats - self._decodes.count
        while waiting and budget > 0 and seats > len(self._chunks):
            before = self._prefilling
            if before is not None and before.kv < before.target:
                break
            request = waiting[0]
            if request.ready:
                break  # its KV is here: it joins at the next boundary and computes nothing
            target = request.prompt + request.sampled
            hit = min(cache.match(request.path), (target - 1) // block)
            new = -(-target // block) - hit
            if not memory.fits(new) and new > memory.room() - cache.loose_on(request.path):
                if self.running:
                    break
                cache.trim(request.path)  # alone, it gets whatever it needs
            waiting.popleft()
            found = hit * block
            tokens = min(target - found, budget)
            self._start(request, target, found)
            memory.place(request, found + tokens)
            self._prefilling = request
            self._chunks.append((request, tokens))
            budget -= tokens

    def _start(self, request: Request, target: int, found: int) -> None:
        """It runs from now on, as the youngest."""
        if request.hit is None:
            request.hit = found
        request.target = target
        request.order = self._orders
        self._orders += 1
        self.memory.start(request, found)

    def _admit_ready(self) -> None:
        """Requests whose KV came with them join the batch as far as their blocks, and a next one each, fit."""
        memory, cache, waiting = self.memory, self.memory.cache, self.waiting
        while waiting and waiting[0].ready and self.running < self._shape.seats:
            request = waiting[0]
            kv = request.prompt + request.sampled - 1
            hit = cache.match(request.path)
            new = -(-(kv + 1) // memory.block) - hit + self._decodes.count  # and a block for the next token of others
            if new > memory.room() - cache.loose_on(request.path):
                if self.running:
                    return
                cache.trim(request.path)
            waiting.popleft()
            self._start(request, kv, hit * memory.block)
            memory.place(request, kv)
            memory.decode(request)
            request.versions = (self.version, self.version)

    # --- how far the plan carries ------

    def _decode_iterations(self) -> int:
        """Until the first of them ends, or the blocks run out."""
        decodes, gain, memory = self._decodes, self._gain, self.memory
        done, cache = decodes.done, memory.cache
        most = -(-(decodes.next_end - done) // gain)
        free = memory.capacity - memory.other - cache.stored
        end = done + most * gain
        now = decodes.private(memory.planned)
        held = decodes.private(end)
        self.quiet = held == now
        if held <= free + cache.loose:
            return most
        low = 1  # fits: the plan took its blocks
        while low + 1 < most:
            middle = (low + most) // 2
            if decodes.private(done + middle * gain) <= free + cache.loose:
                low = middle
            else:
                most = middle
        return low

    def _span_of_chunks(self) -> None:
        """One mixed iteration; or, of a long prompt, all full chunks before a decode ends or it does."""
        span, decodes, chunks = self._span, self._decodes, self._chunks
        count, context, at = decodes.count, decodes.context, span.at
        if len(chunks) > 1:
            spans = [(tokens, request.kv - tokens) for request, tokens in chunks]
            span.end, span.length = at + self._times.mixed(count, context, spans), 1
            span.ends = [span.end]
            return
        request, tokens = chunks[0]
        alone = not (self.waiting and self.waiting[0].ready)  # else it may join at the next boundary
        k = self._full_chunks(request, tokens) if request.kv < request.target and self._shape.jump and alone else 1
        before, grown, mixed = request.kv - tokens, count * self._gain, self._times.mixed
        span.length, span.ends = k, []
        self.quiet = k == 1
        for _ in range(k):
            at += mixed(count, context, ((tokens, before),))
            span.ends.append(at)
            context += grown
            before += tokens
        span.end = at

    def _full_chunks(self, request: Request, tokens: int) -> int:
        """How many chunks like this one, the present one included, the prompt takes before anything else changes."""
        decodes, gain, memory = self._decodes, self._gain, self.memory
        if tokens != self._shape.budget - decodes.count:
            return 1  # memory cut it short
        k = 1 + (request.target - request.kv - 1) // tokens
        if decodes.count:
            k = min(k, -(-(decodes.next_end - decodes.done) // gain))
        cache = memory.cache
        limit = memory.capacity - memory.other - cache.stored + cache.loose
        blocks = -(-((k - 1) * tokens) // memory.block) + 1
        upper = decodes.bound + decodes.count * ((decodes.done + k * gain - decodes.at) // decodes.span + 1)
        return k if upper + blocks <= limit else 1
