"""Which instance holds how much of a prefix, as far as instances have told: what a router consults.

A prefix is a path of (chain, blocks) pairs, a chain being a run of KV blocks under one key: block hashes in the live
system (a block each), longer runs in the simulator. An instance holds the first so many blocks of a chain.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

Path = Sequence[tuple[Hashable, int]]

_MANY = 4


class PrefixIndex:
    """Fed by stored and removed events, in order per instance; it believes them and nothing else."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, dict[int, int]] = {}  # chain -> instance -> blocks
        self._kept: dict[Hashable, tuple[tuple[int, int, int], dict[int, int]]] = {}  # chain -> asked, answer
        self._chains: dict[int, set[Hashable]] = {}  # instance -> chains

    def set(self, instance: int, chain: Hashable, blocks: int) -> None:
        """The instance now holds the chain's first `blocks`, or, with 0, nothing of it."""
        holders = self._holders.get(chain)
        if holders is None:
            if not blocks:
                return
            holders = self._holders[chain] = {}
        elif len(holders) >= _MANY:
            self._kept.pop(chain, None)
        if blocks:
            if instance not in holders:
                self._chains.setdefault(instance, set()).add(chain)
            holders[instance] = blocks
        elif instance in holders:
            del holders[instance]
            self._chains[instance].discard(chain)
            if not holders:
                del self._holders[chain]

    def clear(self, instance: int) -> None:
        """It crashed, or loaded other weights."""
        for chain in list(self._chains.get(instance, ())):
            self.set(instance, chain, 0)

    def match(self, path: Path, block: int = 1) -> dict[int, int]:
        """Leading tokens of the path that each instance holds, at `block` tokens a block; those that hold none are
        left out. Not to be changed.

        An instance that holds some of a chain holds what comes before it on the path: it was computed first and is
        evicted last. So the walk goes back from the end, and what is found first counts.
        """
        found: dict[int, int] = {}
        end = sum([blocks for _, blocks in path])
        for chain, blocks in reversed(path):
            end -= blocks
            holders = self._holders.get(chain)
            if holders is not None and (end or blocks):
                here = self._on(chain, holders, blocks, end, block)
                found = here | found if found else here
        return found

    def _on(self, chain: Hashable, holders: dict[int, int], blocks: int, before: int, block: int) -> dict[int, int]:
        """Who holds some of the chain's first `blocks`, and the tokens up to there. Of many holders the answer is kept
        until one of them tells something new: a system prompt is asked for again and again, and everybody holds it."""
        if len(holders) < _MANY:
            return {i: (before + (stored if stored < blocks else blocks)) * block for i, stored in holders.items()}
        asked = blocks, before, block
        kept = self._kept.get(chain)
        if kept is None or kept[0] != asked:
            tokens = {i: (before + (stored if stored < blocks else blocks)) * block for i, stored in holders.items()}
            kept = self._kept[chain] = asked, tokens
        return kept[1]

    def __len__(self) -> int:
        return len(self._holders)
