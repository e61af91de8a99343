"""Which instance holds how much of a prefix, as far as instances have told: what a router consults.

A prefix is a path of (chain, blocks) pairs, a chain being a run of KV blocks under one key: block hashes in the live
system (a block each), longer runs in the simulator. An instance holds the first so many blocks of a chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Path = Sequence[tuple[Hashable, int]]


class PrefixIndex:
    """Fed by stored and removed events, in order per instance; it believes them and nothing else."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, dict[int, int]] = {}  # chain -> instance -> blocks
        self._chains: dict[int, set[Hashable]] = {}  # instance -> chains

    def set(self, instance: int, chain: Hashable, blocks: int) -> None:
        """The instance now holds the chain's first `blocks`, or, with 0, nothing of it."""
        if blocks:
            self._holders.setdefault(chain, {})[instance] = blocks
            self._chains.setdefault(instance, set()).add(chain)
        elif (holders := self._holders.get(chain)) is not None and instance in holders:
            del holders[instance]
            if not holders:
                del self._holders[chain]
            self._chains[instance].discard(chain)

    def clear(self, instance: int) -> None:
        """It crashed, or loaded other weights."""
        for chain in list(self._chains.get(instance, ())):
            self.set(instance, chain, 0)

    def match(self, path: Path, block: int = 1) -> dict[int, int]:
        """Leading tokens of the path that each instance holds, at `block` tokens a block; those that hold none are
        left out.

        An instance that holds some of a chain holds what comes before it on the path: it was computed first and is
        evicted last. So the walk goes back from the end, and what is found first counts.
        """
        found: dict[int, int] = {}
        end = sum([blocks for _, blocks in path])
        for chain, blocks in reversed(path):
            end -= blocks
            holders = self._holders.get(chain)
            if not holders or not (end or blocks):
                continue
            if min(holders.values()) >= blocks:
                found = dict.fromkeys(holders, (end + blocks) * block) | found
                continue
            for instance, stored in holders.items():
                if instance not in found:
                    found[instance] = (end + (stored if stored < blocks else blocks)) * block
        return found

    def __len__(self) -> int:
        return len(self._holders)
