"""Prefix forests: many token sequences, each distinct prefix once (DESIGN section 2, "Prefix tree merging").

Sequences are sorted, so that neighbours share the longest prefixes, and laid out in depth-first preorder: token by
token a parent stands before its children, and everything below a token stands right behind it. One integer a token,
`end`, then says who may see it: q sees k iff k <= q < end[k].

    forest = Forest.of([[1, 2, 3], [1, 2, 4], [1, 2]])
    forest.tokens       # [1, 2, 3, 4]
    forest.nodes_of(1)  # [0, 1, 3]: where the tokens of sequence 1 are
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forge.types import ForgeError

Ints = NDArray[np.int64]


class ForestError(ForgeError):
    """Sequences that cannot be merged; the message says which, and why."""


@dataclass(frozen=True, kw_only=True)
class Forest:
    """U distinct tokens of n sequences with F tokens in all. Every array is int64 and read-only.

    `tokens`, `depth`, `parent`, `end` are [U] in preorder. `depth` is the position id; `parent` is -1 at a root;
    `end[t]` is one past the last token below t. `order` [n] lists the sequences as sorted, `shared` [n] how many
    tokens each of these has in common with the one sorted before it. `nodes` [F] and `offsets` [n + 1] give the place
    of every token of every sequence, in the order the sequences were given. `extra` [U] is the second key, if any.
    """

    tokens: Ints
    extra: Ints | None
    depth: Ints
    parent: Ints
    end: Ints
    order: Ints
    shared: Ints
    nodes: Ints
    offsets: Ints

    @classmethod
    def of(cls, sequences: Sequence[ArrayLike], extra: Sequence[ArrayLike] | None = None) -> Forest:
        """Merge sequences of token ids. Tokens are the same only where their `extra` keys (an adapter, the hash of
        an image) are too. Empty, equal and nested sequences are fine.

        Raises ForestError for what is no token id, or extra keys of another length.
        """
        ids = [token_ids(sequence, f"sequence {i}") for i, sequence in enumerate(sequences)]
        keys = None
        if extra is not None:
            keys = [token_ids(key, f"extra key {i}") for i, key in enumerate(extra)]
            if [len(k) for k in keys] != [len(s) for s in ids]:
                raise ForestError("extra keys: give exactly one a token of every sequence")
        return _Builder(ids, keys).build()

    def nodes_of(self, sequence: int) -> Ints:
        """Where the tokens of one sequence are."""
        return self.nodes[self.offsets[sequence] : self.offsets[sequence + 1]]

    def __len__(self) -> int:
        """U, the distinct tokens."""
        return len(self.tokens)

    @property
    def flat(self) -> int:
        """F, the tokens of all sequences."""
        return len(self.nodes)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of every sequence."""
        return np.diff(self.offsets)

    @cached_property
    def in_order(self) -> tuple[list[int], list[int], list[int]]:
        """(sequence, its tokens, how many it shares with the one before it) as sorted, without the empty ones."""
        first = int((self.lengths == 0).sum())  # the empty sort first, and share nothing
        order = self.order[first:]
        return order.tolist(), self.lengths[order].tolist(), self.shared[first:].tolist()

    @cached_property
    def multiplicity(self) -> Ints:
        """[U]: through how many sequences each token goes."""
        return np.bincount(self.nodes, minlength=len(self)).astype(np.int64)

    @cached_property
    def segments(self) -> Segments:
        """Maximal runs without a branch; where a sequence ends inside a run, it does not break."""
        return _segments(self)

    @cached_property
    def run_start(self) -> Ints:
        """[U]: the first token of each token's segment."""
        runs = self.segments
        return np.repeat(runs.start, runs.stop - runs.start)

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs that attention over the forest computes: the sum of depth + 1."""
        return int(self.depth.sum()) + len(self)

    @cached_property
    def flat_pairs(self) -> int:
        """The same with every sequence on its own."""
        n = self.lengths
        return int((n * (n + 1) // 2).sum())

    def dense_mask(self) -> NDArray[np.bool_]:
        """[U, U], true where the query (row) may see the key (column). For tests and small subtrees."""
        at = np.arange(len(self))
        return (at[None, :] <= at[:, None]) & (at[:, None] < self.end[None, :])


@dataclass(frozen=True, slots=True)
class Segments:
    """Branchless runs in preorder: segment s holds tokens `start[s]` to `stop[s]` - 1, and those below it are `stop[s]`
    to `below[s]` - 1. All [S]."""

    start: Ints
    stop: Ints
    below: Ints

    def __len__(self) -> int:
        return len(self.start)


def token_ids(sequence: ArrayLike, name: str) -> Ints:
    """A flat int64 array of numbers that are never negative. Raises ForestError, which calls it `name`."""
    array = np.asarray(sequence)
    if array.ndim != 1:
        raise ForestError(f"{name}: must be flat, a list of integers; it has {array.ndim} dimensions")
    if not len(array):
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ForestError(f"{name}: must hold integers, not {array.dtype}")
    if int(array.min()) < 0:
        raise ForestError(f"{name}: holds {int(array.min())}; ids are never negative")
    return array.astype(np.int64)


class _Builder:
    """One pass over the sorted sequences; `path` holds the tokens from the root to the end of the last one."""

    def __init__(self, ids: list[Ints], keys: list[Ints] | None) -> None:
        self.ids, self.keys = ids, keys
        lengths = np.array([len(s) for s in ids], dtype=np.int64)
        self.offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.order = self._sorted()
        self.shared = np.array([self._common(k) for k in range(len(ids))], dtype=np.int64)
        self.size = int((lengths[self.order] - self.shared).sum())

    def _sorted(self) -> Ints:
        # Big-endian bytes compare as the numbers do, and memcmp is all that a sort of long sequences costs.
        def key(i: int) -> bytes:
            columns = self.ids[i] if self.keys is None else np.stack([self.ids[i], self.keys[i]], axis=1)
            return columns.astype(">u8").tobytes()

        texts = [key(i) for i in range(len(self.ids))]
        return np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)

    def _common(self, k: int) -> int:
        """Tokens that the k-th sorted sequence shares with the one before it."""
        if k == 0:
            return 0
        a, b = int(self.order[k - 1]), int(self.order[k])
        n = min(len(self.ids[a]), len(self.ids[b]))
        differs = self.ids[a][:n] != self.ids[b][:n]
        if self.keys is not None:
            differs = differs | (self.keys[a][:n] != self.keys[b][:n])
        first = int(differs.argmax()) if n else 0
        return first if n and differs[first] else n

    def build(self) -> Forest:
        size = self.size
        tokens, depth, parent, end = (np.empty(size, dtype=np.int64) for _ in range(4))
        extra = None if self.keys is None else np.empty(size, dtype=np.int64)
        nodes = np.empty(int(self.offsets[-1]), dtype=np.int64)
        path = np.empty(max((len(s) for s in self.ids), default=0), dtype=np.int64)
        base = open_ = 0  # tokens laid out; length of `path`
        for i, shared in zip(self.order.tolist(), self.shared.tolist(), strict=True):
            ids = self.ids[i]
            new = len(ids) - shared
            if new:
                end[path[shared:open_]] = base  # what the last path had below here is complete
                here = slice(base, base + new)
                tokens[here] = ids[shared:]
                if extra is not None and self.keys is not None:
                    extra[here] = self.keys[i][shared:]
                depth[here] = np.arange(shared, len(ids))
                path[shared : len(ids)] = np.arange(base, base + new)
                parent[here] = np.arange(base - 1, base + new - 1)
                parent[base] = path[shared - 1] if shared else -1
                base += new
                open_ = len(ids)
            nodes[self.offsets[i] : self.offsets[i + 1]] = path[: len(ids)]
        end[path[:open_]] = base
        arrays = (tokens, extra, depth, parent, end, self.order, self.shared, nodes, self.offsets)
        for array in arrays:
            if array is not None:
                array.setflags(write=False)
        return Forest(
            tokens=tokens,
            extra=extra,
            depth=depth,
            parent=parent,
            end=end,
            order=self.order,
            shared=self.shared,
            nodes=nodes,
            offsets=self.offsets,
        )


def _segments(forest: Forest) -> Segments:
    # Of two neighbours in preorder the second is the only child of the first iff as much lies below both.
    start = np.flatnonzero(np.diff(forest.end, prepend=-1))
    stop = np.append(start[1:], len(forest))[: len(start)]
    return Segments(start, stop, forest.end[start])
