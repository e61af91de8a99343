"""What a rollout instance plans at a boundary: continuous batching, chunked prefill, paged KV, preemption.

Every iteration gives each decoding request a token and spends what is left of a token budget on prompts, first come
first served. Nothing changes inside a *span* of iterations with the same batch, so the instance plans one span at a
time and only its end is an event: all iterations until a decoding request ends or memory runs out, all chunks of one
long prompt, or a single mixed iteration. Times are integers, so a span ends exactly where stepping would.

A plan, in this order: running requests take the blocks of their next token, preempting the youngest where there is no
room; the prompt under way takes its chunk; then, unless somebody was preempted, the queue is admitted in order while
budget, seats and memory last. `ENGINE.md` beside this file is the whole contract; `tests/sim/engine_oracle.py` says the
same once more, block by block.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate

from sim.iteration import Times
from sim.kv import Spill
from sim.memory import Memory
from sim.request import Request
from sim.shape import Shape
from sim.span import Span


class Planner:
    """Who waits, who runs, the span under way. `first_tokens` and `ended`: of the last boundary.

    `quiet`: no block is taken until the span ends. `storing`: blocks of chains are, inside the span.
    """

    def __init__(self, times: Times, shape: Shape, listen: bool, spill: Spill | None) -> None:
        self.version = 0
        self.first_tokens: list[Request] = []
        self.ended: list[Request] = []
        self._times = times
        self._shape = shape
        self._listen = listen
        self._spill = spill
        self._orders = 0
        self._sampled = self._preemptions = 0
        self._clear(0)

    def _clear(self, now: int) -> None:
        """Nothing is here."""
        shape = self._shape
        self.waiting: deque[Request] = deque()
        self.memory = Memory(shape.block, shape.capacity, self._times.unit, self._listen, self._spill)
        self.cache = self.memory.cache
        self._decodes = self.memory.decodes
        self._prefilling: Request | None = None  # the prompt under way, the youngest of all that run
        self._span = Span()
        self._gain = 0  # units a decoding request samples in an iteration of the span
        self._begun = 0  # iterations of the span whose blocks are taken
        self._chunks: list[tuple[Request, int]] = []  # of the first iteration, or the one of every iteration
        self._reset(now)

    @property
    def running(self) -> int:
        return self._decodes.count + (len(self._chunks) or (self._prefilling is not None))

    # --- the end of a span ------

    def _take(self, begun: int) -> None:
        """The first `begun` iterations of the span have taken their blocks."""
        more, memory = begun - self._begun, self.memory
        if more <= 0:
            return
        self._begun = begun
        memory.planned = self._decodes.done + begun * self._gain
        if self.storing:
            request, tokens = self._chunks[0]
            memory.place(request, min(request.kv + more * tokens, request.target))
        else:
            memory.evict()

    def _finish(self) -> None:
        """All iterations of the span are over: whoever is done ends, and prompts that are complete have a token."""
        decodes, length = self._decodes, self._span.length
        if not self.quiet:
            self._take(length)
        if decodes.count:
            grown = length * self._gain
            decodes.done += grown
            decodes.context += grown * decodes.count
            if decodes.done >= decodes.next_end:
                for request in decodes.ended():
                    self._end(request)
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

    # --- the plan ------

    def _reset(self, now: int) -> None:
        """No span is under way."""
        self._span.at, self._span.length, self._begun = now, 0, 0
        self.quiet, self.storing = True, False
        self._full = 0  # iterations of the span that leave no budget to others
        self._each = self._left = 0  # prompt tokens: of an iteration, of the whole span at most
        if self._chunks:
            self._chunks, self._span.ends = [], []
        self.memory.planned = self._decodes.done

    def _plan(self, admit: bool) -> None:
        span, decodes, memory = self._span, self._decodes, self.memory
        admit = admit and bool(self.waiting)
        if admit and self.waiting[0].ready:
            self._admit_ready()
        span.a, span.b, self._gain = self._times.line(decodes.count)
        self._begun = 1
        memory.planned = decodes.done + self._gain
        preempted = decodes.count > 0 and not memory.evict() and self._make_room()
        budget = self._shape.budget - decodes.count
        if self._prefilling is not None:
            budget -= self._continue(self._prefilling, budget)
        if admit and not preempted:
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
        waiting, memory, cache = self.waiting, self.memory, self.cache
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
        memory, cache, waiting = self.memory, self.cache, self.waiting
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
        done = decodes.done
        most = -(-(decodes.next_end - done) // gain)
        if done + most * gain < decodes.until:
            return most
        self.quiet = False
        room = memory.for_decodes()
        if decodes.private(done + most * gain) <= room:
            return most
        low = 1  # fits: the plan took its blocks
        while low + 1 < most:
            middle = (low + most) // 2
            if decodes.private(done + middle * gain) <= room:
                low = middle
            else:
                most = middle
        return low

    def _span_of_chunks(self) -> None:
        """One mixed iteration; or, of a long prompt, chunk after chunk."""
        span, decodes, chunks = self._span, self._decodes, self._chunks
        count, context, length = decodes.count, decodes.context, 1
        if len(chunks) > 1:
            listed = [(tokens, request.kv - tokens) for request, tokens in chunks]
            span.ends = [span.at + self._times.mixed(count, context, listed)]
            self._each = self._left = sum([tokens for tokens, _ in listed])
        else:
            request, each = chunks[0]
            before, target = request.kv - each, request.target
            length = self._chunk_iterations(request, each)
            listed = [(min(each, target - kv), kv) for kv in range(before, before + length * each, each)]
            ends = self._times.run(count, context, count * self._gain, listed)
            ends[0] += span.at
            span.ends = list(accumulate(ends))
            self._each, self._left = each, target - before
        self.storing = length > 1
        self.quiet = not self.storing
        span.length, span.end = length, span.ends[-1]

    def _chunk_iterations(self, request: Request, tokens: int) -> int:
        """How many compute a chunk like this one, the present one included, before anything else changes: the full
        ones, and the rest of the prompt where nobody waits for the budget it leaves."""
        decodes, gain, memory, waiting = self._decodes, self._gain, self.memory, self.waiting
        self._full = 1
        left = request.target - request.kv
        cut_short = tokens != self._shape.budget - decodes.count  # by memory
        # A request whose KV is here may join at the next boundary.
        if not left or cut_short or not self._shape.jump or (waiting and waiting[0].ready):
            return 1
        full = k = 1 + left // tokens
        if left % tokens and not waiting:
            k += 1
        if decodes.count:
            k = min(k, -(-(decodes.next_end - decodes.done) // gain))
        blocks = -(-min((k - 1) * tokens, left) // memory.block) + 1
        if decodes.private(decodes.done + k * gain) + blocks > memory.for_decodes():
            return 1
        self._full = min(full, k)
        return k
