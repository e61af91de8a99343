"""Paged KV of one instance: reference counts and LRU per chain, exact to the block.

A chain is a run of blocks (`sim.sessions`). What an instance holds of it is always its first `stored` blocks, and the
blocks of one chain are used together, so one reference count, one place in the LRU order and eviction from the end of
the least recently used chain give the hits and evictions of per-block LRU, at a few operations a request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from sim.sessions import Path

#: Told of what is evicted: chain, and the blocks [low, high) of it.
Spill = Callable[[int, int, int], None]


class Entry:
    """What an instance holds of a chain. `fresh`: of the weights served now, so that others may hit it."""

    __slots__ = ("chain", "fresh", "refs", "stored")

    def __init__(self, chain: int) -> None:
        self.chain = chain
        self.stored = 0
        self.refs = 0
        self.fresh = True


class ChainCache:
    """Blocks of shared chains. `stored` of them in all, of which `loose` are referenced by nobody.

    `dirty`: chains whose `stored` changed since it was last emptied; None where nobody listens.
    """

    __slots__ = ("dirty", "entries", "evicted", "loose", "lru", "spill", "stored")

    def __init__(self, listen: bool = False, spill: Spill | None = None) -> None:
        self.entries: dict[int, Entry] = {}
        self.lru: OrderedDict[int, Entry] = OrderedDict()
        self.stored = 0
        self.loose = 0
        self.evicted = 0
        self.dirty: set[int] | None = set() if listen else None
        self.spill = spill

    def match(self, path: Path) -> int:
        """Blocks of the path that are here."""
        hit = 0
        for chain, blocks in path:
            entry = self.entries.get(chain)
            if entry is None:
                break
            if entry.stored < blocks:
                return hit + entry.stored
            hit += blocks
        return hit

    def loose_on(self, path: Path) -> int:
        """Of the path's chains, the blocks that holding it would save from eviction."""
        lru = self.lru
        return sum(lru[chain].stored for chain, _ in path if chain in lru)

    def hold(self, path: Path) -> tuple[Entry, ...]:
        held = []
        for chain, _ in path:
            entry = self.entries.get(chain)
            if entry is None:
                entry = self.entries[chain] = Entry(chain)
            elif entry.refs == 0:
                del self.lru[chain]
                self.loose -= entry.stored
            entry.refs += 1
            held.append(entry)
        return tuple(held)

    def release(self, held: tuple[Entry, ...]) -> None:
        """The last chain first: it is evicted before those it hangs on."""
        for entry in reversed(held):
            entry.refs -= 1
            if entry.refs:
                continue
            if not entry.fresh:
                self.stored -= entry.stored
            elif entry.stored:
                self.lru[entry.chain] = entry
                self.loose += entry.stored
            else:
                del self.entries[entry.chain]

    def store(self, entry: Entry, blocks: int) -> int:
        """A held chain now has at least `blocks`; returns how many are new."""
        new = blocks - entry.stored
        if new <= 0:
            return 0
        entry.stored = blocks
        self.stored += new
        if self.dirty is not None:
            self.dirty.add(entry.chain)
        return new

    def evict(self, blocks: int) -> None:
        """Free `blocks`, which must be loose, from the end of the least recently used chains."""
        self.stored -= blocks
        self.loose -= blocks
        self.evicted += blocks
        lru, spill = self.lru, self.spill
        while blocks:
            chain, entry = next(iter(lru.items()))
            gone = min(blocks, entry.stored)
            entry.stored -= gone
            blocks -= gone
            if spill is not None:
                spill(chain, entry.stored, entry.stored + gone)
            if self.dirty is not None:
                self.dirty.add(chain)
            if not entry.stored:
                del lru[chain], self.entries[chain]

    def trim(self, path: Path) -> None:
        """Evict what loose chains of the path hold beyond it."""
        for chain, blocks in path:
            if chain in self.lru and self.lru[chain].stored > blocks:
                self.lru.move_to_end(chain, last=False)
                self.evict(self.lru[chain].stored - blocks)

    def insert(self, path: Path, blocks: int) -> None:
        """The path's first `blocks` have arrived from elsewhere and are loose; the caller has made room."""
        held = self.hold(path)
        for (_, of_chain), entry in zip(path, held, strict=True):
            self.store(entry, min(of_chain, blocks))
            blocks -= of_chain
            if blocks <= 0:
                break
        self.release(held)

    def renew(self) -> None:
        """Other weights: loose blocks vanish, held ones stay with their holders and are hit by nobody else."""
        for entry in self.entries.values():
            if self.dirty is not None:
                self.dirty.add(entry.chain)
            entry.fresh = False
        self.stored -= self.loose
        self.loose = 0
        self.entries = {}
        self.lru = OrderedDict()

    def stored_of(self, chain: int) -> int:
        entry = self.entries.get(chain)
        return 0 if entry is None else entry.stored
