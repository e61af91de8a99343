"""Paged KV of one instance: reference counts and LRU per chain, exact to the block.

A chain is a run of blocks (`sim.sessions`). What an instance holds of it is always its first `stored` blocks, and the
blocks of one chain are used together, so one reference count, one place in the LRU order and eviction from the end of
the least recently used chain give the hits and evictions of per-block LRU, at a few operations a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sim.sessions import Path

#: Told of what is evicted: chain, and the blocks [low, high) of it.
Spill = Callable[[int, int, int], None]


class Entry:
    """What an instance holds of a chain. `fresh`: of the weights served now, so that others may hit it. `left`: nobody
    is expected to come back to it. While nobody holds it: `before` and `after` it in the order of last use. In no
    order, it is next to itself or to the ends."""

    __slots__ = ("after", "before", "chain", "fresh", "left", "refs", "stored")

    def __init__(self, chain: int, ends: Entry | None = None) -> None:
        self.chain = chain
        self.stored = 0
        self.refs = 0
        self.fresh = True
        self.left = False
        self.before: Entry = ends or self
        self.after: Entry = ends or self


class ChainCache:
    """Blocks of shared chains. `stored` of them in all, of which `loose` are referenced by nobody. Chains that are left
    are evicted first.

    `dirty`: chains whose `stored` changed since it was last emptied; None where nobody listens.
    """

    __slots__ = ("_ends", "_left", "dirty", "entries", "evicted", "loose", "spill", "stored")

    def __init__(self, listen: bool = False, spill: Spill | None = None) -> None:
        self.entries: dict[int, Entry] = {}
        self._ends = Entry(-1)  # a ring: after it the least recently used, before it the most recently used
        self._left = Entry(-1)  # one of the chains that are left
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
        held = [self.entries[chain] for chain, _ in path if chain in self.entries]
        return sum([entry.stored for entry in held if not entry.refs])

    def hold(self, path: Path) -> tuple[Entry, ...]:
        held = []
        for chain, _ in path:
            entry = self.entries.get(chain)
            if entry is None:
                entry = self.entries[chain] = Entry(chain, self._ends)
            elif entry.refs == 0:
                self._unlink(entry)
                self.loose -= entry.stored
            entry.refs += 1
            entry.left = False
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
                self._link(entry, self._left if entry.left else self._ends)
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
        while blocks:
            entry = self._left.after
            if entry is self._left:
                entry = self._ends.after
            gone = blocks if blocks < entry.stored else entry.stored
            entry.stored -= gone
            blocks -= gone
            if self.spill is not None and not entry.left:
                self.spill(entry.chain, entry.stored, entry.stored + gone)
            if self.dirty is not None:
                self.dirty.add(entry.chain)
            if not entry.stored:
                self._unlink(entry)
                del self.entries[entry.chain]

    def forget(self, chain: int) -> None:
        """Nobody is expected to come back to it."""
        entry = self.entries.get(chain)
        if entry is not None:
            entry.left = True
            if not entry.refs:
                self._unlink(entry)
                self._link(entry, self._left)

    def trim(self, path: Path) -> None:
        """Evict what loose chains of the path hold beyond it."""
        for chain, blocks in path:
            entry = self.entries.get(chain)
            if entry is not None and not entry.refs and entry.stored > blocks:
                self._unlink(entry)
                self._link(entry, self._left.after)
                self.evict(entry.stored - blocks)

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
        ends = self._ends
        for entry in self.entries.values():
            if self.dirty is not None:
                self.dirty.add(entry.chain)
            entry.fresh = False
            entry.before = entry.after = ends
        ends.before = ends.after = ends
        self._left.before = self._left.after = self._left
        self.stored -= self.loose
        self.loose = 0
        self.entries = {}

    def stored_of(self, chain: int) -> int:
        entry = self.entries.get(chain)
        return 0 if entry is None else entry.stored

    # --- the order of last use ------

    def unused(self) -> Iterator[Entry]:
        """Those that nobody holds, the first to be evicted first."""
        for ends in (self._left, self._ends):
            entry = ends.after
            while entry is not ends:
                yield entry
                entry = entry.after

    def _link(self, entry: Entry, after: Entry) -> None:
        """It comes right before `after`."""
        before = after.before
        entry.before, entry.after = before, after
        before.after = after.before = entry

    def _unlink(self, entry: Entry) -> None:
        before, after = entry.before, entry.after
        before.after, after.before = after, before
        entry.before = entry.after = self._ends
