"""A second, naive model of one rollout instance, to compare the engine of the simulator with.

Written from the contract of an instance alone. It steps through every iteration and keeps every KV block as an object
of its own, which is free, private to one request, stored as block (chain, index), or detached (stored before a load of
weights and still held). Stored blocks of a chain are owned by every running request whose path names the chain; a
release gives them back from the last to the first, so that "least recently used" is a plain order over blocks.

Where the contract leaves room, the oracle decides thus:

- Everything with a time <= a boundary (arrivals, then cancels, then loads) is in before that boundary. A request is
  never admitted if it is cancelled at the instant of its arrival. Cancels of requests unknown or ended do nothing.
- At a boundary: tokens are sampled, complete requests end, cancelled ones end, a load happens, the plan is made. A
  request that completes at the boundary its cancel would take effect has completed: it stores what `keep` says.
- A plan that preempts everybody is made again at once: the head is then admitted into the empty instance.
- A lone prefill without room (what others kept in chains of its path fills the cache) is preempted, and planned again.
- Chunks of 0 tokens, those of a prefill without room beside decodes, do not reach the cost.
- A partly filled block is private even if the chain has it already; once full it is dropped for the chain's.
- What is evicted for a head that is admitted into an empty instance is all that the loose chains of its path hold
  beyond the path. It counts as evicted; what vanishes with a load does not.
- A load happens at its start; one called while another lasts happens at the next boundary, the end of the other.
- A request preempted or waiting while an instance drains waits until the load is over.
- Busy time is that of iterations, without loads. Every sampled token but a request's first is a decode token, the one
  at the end of a recomputed prefill too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Cost = Callable[[int, int, list[tuple[int, int]]], int]
"""cost(decodes, tokens of KV they held before, [(tokens, KV before) of each chunk]) in femtoseconds."""

Load = tuple[int, int, int, str]
"""(time, version, duration, mode), mode one of in_flight, drain, abort."""


@dataclass(frozen=True)
class OracleRequest:
    """A request: `arrival` in femtoseconds, `path` the full blocks its prompt begins with as (chain, blocks)."""

    id: int
    arrival: int
    prompt: int
    output: int
    path: tuple[tuple[int, int], ...] = ()
    keep: bool = False


@dataclass
class OracleReport:
    """What became of one request; `end` is the time of its completion or of its cancellation."""

    first_token: int | None = None
    end: int | None = None
    sampled: int = 0
    preemptions: int = 0
    hit_tokens: int = 0


class Boundary(NamedTuple):
    """The instance after the plan of a boundary (or at the start of a load)."""

    time: int
    used: int
    free: int
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    loading: bool


@dataclass
class OracleResult:
    """Reports by request id, totals of the instance, and what is stored at the end."""

    requests: dict[int, OracleReport]
    iterations: int = 0
    busy: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    evicted_blocks: int = 0
    stored: dict[int, int] = field(default_factory=dict)
    log: list[Boundary] = field(default_factory=list)


@dataclass(eq=False)
class _Block:
    """One block of KV memory: of a chain if `chain` is set, else free or private to the request that lists it."""

    number: int
    chain: int | None = None
    index: int = 0
    owners: list[_Sequence] = field(default_factory=list)
    released: int = 0  # the later, the more recently used; counts only without owners


@dataclass(eq=False)
class _Sequence:
    """A request that waits or runs."""

    request: OracleRequest
    report: OracleReport
    sampled: int = 0
    kv: int = 0
    target: int = 0
    hit: int = 0  # tokens of the KV held that were found stored at this admission
    written: int = 0  # tokens of the KV held that were computed since this admission
    blocks: list[_Block] = field(default_factory=list)  # those that hold the KV, in order
    generation: int = 0  # number of loads that had happened at admission
    admitted: bool = False
    samples: bool = False  # whether the iteration under way gives it a token
    cancelled: bool = False

    @property
    def decodes(self) -> bool:
        """Whether its prefill is done."""
        return self.kv >= self.target


class OracleInstance:
    """One instance: `capacity` blocks of `block` tokens, `budget` tokens an iteration, `max_seqs` running requests."""

    def __init__(self, block: int, capacity: int, budget: int, max_seqs: int, cost: Cost) -> None:
        if min(block, capacity, budget, max_seqs) < 1:
            raise ValueError("block, capacity, budget and max_seqs are at least 1")
        self.block = block
        self.capacity = capacity
        self.budget = budget
        self.max_seqs = max_seqs
        self.cost = cost

    def run(
        self,
        requests: Sequence[OracleRequest],
        loads: Iterable[Load] = (),
        cancels: Iterable[tuple[int, int]] = (),
        forgets: Iterable[tuple[int, int]] = (),
        record: bool = False,
    ) -> OracleResult:
        """Serve `requests` from an empty instance until nothing is left to do; `record` fills the result's log."""
        self._refuse(requests)
        self.free_blocks = [_Block(number) for number in range(self.capacity)]
        self.stored: dict[tuple[int, int], _Block] = {}
        self.detached: list[_Block] = []
        self.waiting: list[_Sequence] = []
        self.running: list[_Sequence] = []
        self.sequences: dict[int, _Sequence] = {}
        self.pending: Load | None = None
        self.generation = 0
        self.releases = 0
        self.trimmed: dict[int, int] = {}
        self.left: set[int] = set()  # chains to be evicted first
        self.result = OracleResult({request.id: OracleReport() for request in requests})

        events: list[tuple[int, int, OracleRequest | int | Load]] = []
        events += [(request.arrival, 0, request) for request in requests]
        events += [(time, 1, identity) for time, identity in cancels]
        events += [(load[0], 2, load) for load in loads]
        events += [(time, 3, chain) for time, chain in forgets]
        events.sort(key=lambda event: event[:2])  # stable: of one instant in the order given

        until: int | None = None  # end of the iteration or load under way; None: idle
        while until is not None or events:
            now = events[0][0] if until is None else until
            while events and events[0][0] <= now:
                self._deliver(*events.pop(0))
            self._end_iteration(now)
            until = self._begin(now)
            self._check()
            if record:
                self.result.log.append(
                    Boundary(
                        now,
                        self.used(),
                        len(self.free_blocks),
                        tuple(sequence.request.id for sequence in self.running),
                        tuple(sequence.request.id for sequence in self.waiting),
                        self.loading,
                    )
                )
        self._check_end()
        self.result.stored = {chain: self.count(chain) for chain in sorted({chain for chain, _ in self.stored})}
        return self.result

    # Counting blocks.

    def count(self, chain: int) -> int:
        """Number of blocks stored of a chain."""
        return sum(1 for other, _ in self.stored if other == chain)

    def used(self) -> int:
        """Blocks that hold something: those of chains once each, and the private ones."""
        return len(self.stored) + len(self.detached) + sum(len(self._private(sequence)) for sequence in self.running)

    def evictable(self, but: Collection[int | None] = ()) -> int:
        """Number of stored blocks that nobody owns, `but` those of some chains."""
        return sum(1 for block in self.stored.values() if not block.owners and block.chain not in but)

    def _private(self, sequence: _Sequence) -> list[_Block]:
        return [block for block in sequence.blocks if block.chain is None]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block)

    # Moving blocks.

    def _take(self, blocks: int) -> list[_Block]:
        """Free blocks, evicted one by one if there are too few."""
        while len(self.free_blocks) < blocks:
            loose = [block for block in self.stored.values() if not block.owners]
            self._evict(min(loose, key=lambda block: (block.chain not in self.left, block.released)))
        return [self.free_blocks.pop() for _ in range(blocks)]

    def _evict(self, block: _Block) -> None:
        assert block.chain is not None
        assert not block.owners
        assert (block.chain, block.index + 1) not in self.stored, "a chain is evicted from its end"
        del self.stored[block.chain, block.index]
        if not self.count(block.chain):
            self.left.discard(block.chain)
        self._give(block)
        self.result.evicted_blocks += 1

    def _give(self, block: _Block) -> None:
        block.chain, block.index = None, 0
        block.owners = []
        self.free_blocks.append(block)

    def _store(self, block: _Block, chain: int, index: int) -> None:
        """Make a private block one of a chain: it belongs to all that run on the chain."""
        assert block.chain is None
        assert (chain, index) not in self.stored
        block.chain, block.index = chain, index
        block.owners = [sequence for sequence in self.running if self._current(sequence, chain)]
        assert block.owners
        self.stored[chain, index] = block

    def _current(self, sequence: _Sequence, chain: int) -> bool:
        """Whether a running request refers to the chain as stored today, not to one detached by a load."""
        return sequence.generation == self.generation and chain in dict(sequence.request.path)

    def _release(self, sequence: _Sequence) -> None:
        """Give back all blocks: those of the path from the last to the first, then the private ones."""
        for chain, _ in reversed(sequence.request.path):
            owned = [b for b in [*self.stored.values(), *self.detached] if b.chain == chain and sequence in b.owners]
            for block in sorted(owned, key=lambda block: block.index, reverse=True):
                block.owners.remove(sequence)
                if block.owners:
                    continue
                if block in self.detached:
                    self.detached.remove(block)
                    sequence.blocks = [other for other in sequence.blocks if other is not block]
                    self._give(block)
                else:
                    self.releases += 1
                    block.released = self.releases
            others = any(self._current(other, chain) for other in self.running if other is not sequence)
            if not others and not self.count(chain):
                self.left.discard(chain)
        for block in self._private(sequence):
            self._give(block)
        sequence.blocks = []
        sequence.kv = sequence.target = sequence.hit = sequence.written = 0
        sequence.samples = False

    def _grow(self, sequence: _Sequence, tokens: int) -> None:
        """Write `tokens` more of KV. Full blocks within the path are the chains', unless a load came in between."""
        kv = sequence.kv + tokens
        names = [(chain, index) for chain, blocks in sequence.request.path for index in range(blocks)]
        if sequence.generation != self.generation:
            names = []
        touched = range(sequence.kv // self.block, self._blocks_for(kv))
        full_names = {i: names[i] for i in touched if i < len(names) and (i + 1) * self.block <= kv}
        held = dict(enumerate(sequence.blocks))
        for i, name in full_names.items():
            if name in self.stored:
                if i in held:
                    self._give(held[i])
                held[i] = self.stored[name]
        missing = [i for i in touched if i not in held]
        held.update(zip(missing, self._take(len(missing)), strict=True))
        for i, name in full_names.items():
            if name not in self.stored:
                self._store(held[i], *name)
        sequence.blocks = [held[i] for i in range(self._blocks_for(kv))]
        sequence.kv = kv
        sequence.written += tokens

    # What comes from outside.

    def _refuse(self, requests: Sequence[OracleRequest]) -> None:
        if len({request.id for request in requests}) < len(requests):
            raise ValueError("two requests have one id")
        for request in requests:
            lengths = [blocks for _, blocks in request.path]
            if request.prompt < 1 or request.output < 1 or request.arrival < 0:
                raise ValueError(f"request {request.id} is empty or too early")
            if self._blocks_for(request.prompt + request.output) > self.capacity:
                raise ValueError(f"request {request.id} never fits")
            if sum(lengths) > request.prompt // self.block or min(lengths, default=0) < 0 or 0 in lengths[:-1]:
                raise ValueError(f"request {request.id} has no such path")
            if len(dict(request.path)) < len(request.path):
                raise ValueError(f"request {request.id} names a chain twice")

    def _leave(self, chain: int) -> None:
        """Nobody is expected to come back to it. One that is not known here is not left."""
        held = any(self._current(sequence, chain) for sequence in self.running)
        if not held and not self.count(chain):
            return
        self.left.add(chain)
        if not held:
            for index in reversed(range(self.count(chain))):
                self.releases += 1
                self.stored[chain, index].released = self.releases

    def _deliver(self, time: int, kind: int, what: OracleRequest | int | Load) -> None:
        if kind == 3:
            assert isinstance(what, int)
            self._leave(what)
        elif isinstance(what, OracleRequest):
            self.sequences[what.id] = _Sequence(what, self.result.requests[what.id])
            self.waiting.append(self.sequences[what.id])
        elif isinstance(what, int):
            sequence = self.sequences.get(what)
            if sequence in self.running:
                sequence.cancelled = True
            elif sequence in self.waiting:
                self.waiting.remove(sequence)
                self._report_end(sequence, time)
        else:
            if what[3] not in ("in_flight", "drain", "abort"):
                raise ValueError(f"no such mode: {what[3]}")
            self.pending = what

    # Boundaries.

    def _end_iteration(self, now: int) -> None:
        """Sample the tokens of the iteration that is over, end what is complete, then what is cancelled."""
        for sequence in self.running:
            if sequence.samples:
                sequence.samples = False
                sequence.sampled += 1
                if sequence.report.first_token is None:
                    sequence.report.first_token = now
                else:
                    self.result.decode_tokens += 1
        for sequence in list(self.running):
            if sequence.sampled == sequence.request.output:
                self._keep(sequence)
                self._end(sequence, now)
        for sequence in list(self.running):
            if sequence.cancelled:
                self._end(sequence, now)

    def _keep(self, sequence: _Sequence) -> None:
        """Store the full blocks beyond the path as further ones of its last chain."""
        request = sequence.request
        assert sequence.kv == request.prompt + request.output - 1
        if not request.keep or not request.path or sequence.generation != self.generation:
            return
        last, index = request.path[-1]
        for block in sequence.blocks[sum(blocks for _, blocks in request.path) : sequence.kv // self.block]:
            if (last, index) not in self.stored:
                self._store(block, last, index)
            index += 1

    def _end(self, sequence: _Sequence, now: int) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self._report_end(sequence, now)

    def _report_end(self, sequence: _Sequence, now: int) -> None:
        sequence.report.end = now
        sequence.report.sampled = sequence.sampled

    def _preempt(self) -> None:
        """Send the last running request to the front of those that wait."""
        sequence = self.running[-1]
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.insert(0, sequence)
        sequence.report.preemptions += 1

    def _begin(self, now: int) -> int | None:
        """Load or plan; returns when what begins is over, None if nothing does."""
        self.loading = False
        while True:
            if self.pending is not None and (self.pending[3] != "drain" or not self.running):
                _, _, duration, mode = self.pending
                self.pending = None
                if mode == "abort":
                    while self.running:
                        self._preempt()
                self._forget()
                self.loading = True
                return now + duration
            preempted, decodes, context, chunks = self._plan()
            if self.running:
                assert decodes or chunks
                duration = self.cost(decodes, context, chunks)
                assert duration >= 0
                self.result.iterations += 1
                self.result.busy += duration
                self.result.prefill_tokens += sum(tokens for tokens, _ in chunks)
                return now + duration
            if self.pending is None and not preempted:
                assert not self.waiting, "nothing runs, yet the head is not admitted"
                return None

    def _forget(self) -> None:
        """A load happens: what nobody owns vanishes, the rest is no longer found."""
        for name, block in list(self.stored.items()):
            del self.stored[name]
            if block.owners:
                self.detached.append(block)
            else:
                self._give(block)
        self.generation += 1
        self.trimmed = {}
        self.left = set()

    def _plan(self) -> tuple[bool, int, int, list[tuple[int, int]]]:
        """Whether anybody was preempted, the number of decodes, the KV they held before, and the chunks."""
        preempted = False
        while True:
            decodes = [sequence for sequence in self.running if sequence.decodes]
            needed = sum(1 for sequence in decodes if sequence.kv % self.block == 0)
            if needed <= len(self.free_blocks) + self.evictable():
                break
            self._preempt()
            preempted = True
        context = sum(sequence.kv for sequence in decodes)
        prefills = [sequence for sequence in self.running if not sequence.decodes]
        assert prefills in ([], self.running[-1:])
        for sequence in decodes:
            sequence.samples = True
            sequence.target += 1
            self._grow(sequence, 1)

        left = self.budget - len(decodes)
        chunks: list[tuple[int, int]] = []
        assert left >= len(prefills), "each that runs had a token of the budget when it came"
        for sequence in prefills:
            slack = -sequence.kv % self.block
            room = (len(self.free_blocks) + self.evictable()) * self.block + slack
            tokens = min(sequence.target - sequence.kv, left, room)
            if tokens:
                self._chunk(sequence, tokens, chunks)
                left -= tokens
            elif not decodes:
                self._preempt()
                return True, 0, 0, []

        while (
            not preempted
            and self.pending is None
            and left > 0
            and len(self.running) < self.max_seqs
            and self.waiting
            and all(sequence.decodes for sequence in self.running)
        ):
            sequence = self.waiting[0]
            path = dict(sequence.request.path)
            target = sequence.request.prompt + sequence.sampled
            hit = min(self._hit(sequence), (target - 1) // self.block)
            new = self._blocks_for(target) - hit
            if new > len(self.free_blocks) + self.evictable(but=path):
                if self.running:
                    break
                self._trim(sequence)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self._admit(sequence, target, hit)
            tokens = min(target - sequence.kv, left)
            self._chunk(sequence, tokens, chunks)
            left -= tokens
        return preempted, len(decodes), context, chunks

    def _hit(self, sequence: _Sequence) -> int:
        """Number of blocks at the start of the path that are stored."""
        hit = 0
        for chain, blocks in sequence.request.path:
            for index in range(blocks):
                if (chain, index) not in self.stored:
                    return hit
                hit += 1
        return hit

    def _trim(self, sequence: _Sequence) -> None:
        """Evict what the chains of the path hold beyond it; nothing runs."""
        for chain, blocks in sequence.request.path:
            for index in range(self.count(chain) - 1, blocks - 1, -1):
                self._evict(self.stored[chain, index])
                self.trimmed[chain] = min(index, self.trimmed.get(chain, index))

    def _admit(self, sequence: _Sequence, target: int, hit: int) -> None:
        """Let it own what is stored of its chains, and begin with the blocks hit."""
        names = [(chain, index) for chain, blocks in sequence.request.path for index in range(blocks)]
        for block in self.stored.values():
            if block.chain in dict(sequence.request.path):
                block.owners.append(sequence)
        self.left -= set(dict(sequence.request.path))
        sequence.generation = self.generation
        sequence.target = target
        sequence.kv = sequence.hit = hit * self.block
        sequence.blocks = [self.stored[name] for name in names[:hit]]
        if not sequence.admitted:
            sequence.admitted = True
            sequence.report.hit_tokens = sequence.hit

    def _chunk(self, sequence: _Sequence, tokens: int, chunks: list[tuple[int, int]]) -> None:
        chunks.append((tokens, sequence.kv))
        self._grow(sequence, tokens)
        sequence.samples = sequence.kv == sequence.target

    # Invariants.

    def _check(self) -> None:
        """What holds after every plan."""
        private = [block for sequence in self.running for block in self._private(sequence)]
        everywhere = [*self.free_blocks, *self.stored.values(), *self.detached, *private]
        assert sorted(block.number for block in everywhere) == list(range(self.capacity)), "a block is in one place"
        assert self.used() + len(self.free_blocks) == self.capacity
        assert len(self.running) <= self.max_seqs
        assert all(not sequence.blocks and sequence.kv == 0 for sequence in self.waiting)
        assert all(sequence.decodes for sequence in self.running[:-1]), "one prefill at a time, and it is the last"

        for sequence in self.running:
            request = sequence.request
            done = sequence.sampled + (1 if sequence.samples else 0)
            assert len(sequence.blocks) == self._blocks_for(sequence.kv)
            assert sequence.kv == sequence.hit + sequence.written
            assert sequence.sampled < request.output
            assert sequence.kv < sequence.target or sequence.kv == request.prompt + done - 1
            if sequence.generation == self.generation:
                shared = min(sequence.kv // self.block, sum(blocks for _, blocks in request.path))
                names = [(chain, index) for chain, blocks in request.path for index in range(blocks)]
                assert sequence.blocks[:shared] == [self.stored[name] for name in names[:shared]]
                assert all(block.chain is None for block in sequence.blocks[shared:])

        chains = {chain for chain, _ in self.stored}
        holders = {chain: [s for s in self.running if self._current(s, chain)] for chain in chains}
        for (chain, index), block in self.stored.items():
            assert (block.chain, block.index) == (chain, index)
            assert index == 0 or (chain, index - 1) in self.stored, "a chain's stored blocks are its first"
            assert block.owners == holders[chain]
        for block in self.detached:
            assert block.owners
            assert all(s in self.running and s.generation < self.generation for s in block.owners)

        counts = {chain: self.count(chain) for chain in chains}
        for path in {sequence.request.path for sequence in self.sequences.values() if sequence.admitted}:
            if any(self.trimmed.get(chain, blocks) < blocks for chain, blocks in path):
                continue  # what is stored after a chain cut for a head with a shorter path is found again once it grew
            for (earlier, blocks), (later, _) in itertools.pairwise(path):
                if counts.get(later, 0):
                    assert counts.get(earlier, 0) >= blocks, "a path is stored from its start"

    def _check_end(self) -> None:
        """What holds when nothing is left to do."""
        assert not self.running
        assert not self.waiting
        assert not self.detached
        assert self.pending is None
        reports = self.result.requests.values()
        assert all(report.end is not None for report in reports)
        assert self.result.decode_tokens == sum(max(0, report.sampled - 1) for report in reports)
        assert all((report.first_token is None) == (report.sampled == 0) for report in reports)
