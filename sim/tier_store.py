"""KV blocks outside an instance's own memory: what is where, and what has to go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

#: Weights version and chain: blocks of two versions have nothing in common.
Key = tuple[int, int]


class Tier:
    """`capacity` blocks of chains, least recently used out first, the end of a chain before its beginning. A chain may
    be here in pieces. `overflow` gets what goes: key and the blocks [low, high)."""

    __slots__ = ("_chains", "_overflow", "capacity", "stored")

    def __init__(self, capacity: int, overflow: Callable[[Key, int, int], None] | None = None) -> None:
        self.capacity = capacity
        self.stored = 0
        self._overflow = overflow
        self._chains: OrderedDict[Key, list[tuple[int, int]]] = OrderedDict()

    def reach(self, key: Key, low: int) -> int:
        """The end of the run of blocks that begins at `low`; `low` where that block is not here."""
        for begin, end in self._chains.get(key, ()):
            if begin <= low < end:
                return end
        return low

    def touch(self, key: Key) -> None:
        """It was used just now."""
        if key in self._chains:
            self._chains.move_to_end(key)

    def put(self, key: Key, low: int, high: int) -> None:
        apart, held = [], 0
        for begin, end in self._chains.pop(key, []):
            held += end - begin
            if end < low or begin > high:
                apart.append((begin, end))
            else:
                low, high = min(low, begin), max(high, end)
        pieces = sorted([*apart, (low, high)])
        self._chains[key] = pieces
        self.stored += sum(end - begin for begin, end in pieces) - held
        while self.stored > self.capacity:
            self._evict(self.stored - self.capacity)

    def forget(self, key: Key) -> None:
        """Nobody is expected to come back to it: it is the next to go."""
        if key in self._chains:
            self._chains.move_to_end(key, last=False)

    def clear(self) -> None:
        self._chains.clear()
        self.stored = 0

    def _evict(self, blocks: int) -> None:
        """At most `blocks`, from the last piece of the chain that was not used for longest."""
        key, pieces = next(iter(self._chains.items()))
        begin, end = pieces.pop()
        low = max(begin, end - blocks)
        if low > begin:
            pieces.append((begin, low))
        elif not pieces:
            del self._chains[key]
        self.stored -= end - low
        if self._overflow is not None:
            self._overflow(key, low, end)


class Stores:
    """Host memory of each of `count` instances (L2, `l2` blocks each) over one store for all (L3, `l3` blocks)."""

    def __init__(self, count: int, l2: int, l3: int) -> None:
        self.shared = Tier(l3)
        self.hosts = [Tier(l2, self.shared.put) for _ in range(count)]

    def spill(self, i: int, version: Callable[[], int]) -> Callable[[int, int, int], None]:
        """What instance `i`, which serves `version`, does with blocks that it evicts."""
        put = self.hosts[i].put
        return lambda chain, low, high: put((version(), chain), low, high)

    def find(self, i: int, key: Key, low: int) -> tuple[int, int]:
        """The tier (2 or 3) that has block `low` nearest to instance `i`, and where its run ends; (0, low): none."""
        end = self.hosts[i].reach(key, low)
        if end > low:
            return 2, end
        end = self.shared.reach(key, low)
        return (3, end) if end > low else (0, low)

    def touch(self, i: int, key: Key) -> None:
        self.hosts[i].touch(key)
        self.shared.touch(key)

    def forget(self, i: int, key: Key) -> None:
        self.hosts[i].forget(key)
        self.shared.forget(key)
