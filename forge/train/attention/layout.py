"""Who sees whom: the tree mask of one forward pass, as one integer a key.

The queries are a stretch of a forest in preorder, the keys are the path above it (`past`, by rising depth) and then
the queries' own tokens. Key j is seen by the queries `begin[j] <= q < end[j]`, where `begin` is j - past, or 0 for the
past. A whole forest is the case without a past.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forge.forest import Forest, Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeLayout:
    """`end` [K], `q_depth` [Q], `k_depth` [K] with K = past + Q, int64, on the host. Depths are position ids."""

    past: int
    end: Ints
    q_depth: Ints
    k_depth: Ints
    made: dict[Any, Any] = field(default_factory=dict)  # what a backend works out once; its name and what it is of

    @classmethod
    def of(cls, forest: Forest) -> TreeLayout:
        return cls(past=0, end=forest.end, q_depth=forest.depth, k_depth=forest.depth)

    @classmethod
    def chunk(cls, forest: Forest, first: int, last: int) -> TreeLayout:
        """Of tokens `first` to `last` - 1 of a forest; their past is `above(forest, first)`.

        Every token before `first` that any of them sees is an ancestor of `first`, for a subtree is one stretch.
        """
        past = above(forest, first)
        own = np.minimum(forest.end[first:last], last) - first
        seen = np.minimum(forest.end[past], last) - first
        depth = forest.depth[first:last]
        return cls(
            past=len(past),
            end=np.concatenate([seen, own]),
            q_depth=depth,
            k_depth=np.concatenate([forest.depth[past], depth]),
        )

    @property
    def queries(self) -> int:
        return len(self.q_depth)

    @property
    def keys(self) -> int:
        return len(self.end)

    @cached_property
    def begin(self) -> Ints:
        """[K]: the first query that sees each key."""
        return np.maximum(np.arange(self.keys) - self.past, 0)

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(first key, one past the last, end): maximal runs of keys that the same last query sees, past and own apart.

        A run of own keys [a, b) is seen causally by its own queries and fully by all that follow up to `end`.
        """
        breaks = np.diff(self.end, prepend=-1) != 0
        if self.past < self.keys:
            breaks[self.past] = True
        start = np.flatnonzero(breaks).tolist()
        return list(zip(start, [*start[1:], self.keys], self.end[start].tolist(), strict=True))

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs that are seen."""
        return int((self.end - self.begin).sum())

    def windowed(self, window: int | None) -> int | None:
        """The sliding window where it hides anything here, else None."""
        if window is None or not self.queries or int(self.q_depth.max()) < window:
            return None
        return window

    def mask(self, queries: slice, keys: slice, window: int | None = None) -> np.ndarray:
        """Boolean [queries, keys], true where seen. `window`: only keys less than so many positions back."""
        q = np.arange(queries.start, queries.stop)[:, None]
        seen: np.ndarray = (self.begin[None, keys] <= q) & (q < self.end[None, keys])
        if window is not None:
            seen &= self.q_depth[queries, None] - self.k_depth[None, keys] < window
        return seen


def above(forest: Forest, token: int) -> Ints:
    """The ancestors of a token, root first."""
    path = []
    at = int(forest.parent[token]) if token < len(forest) else -1
    while at >= 0:
        # A whole run at a time: within one, each token is the parent of the next.
        start = int(forest.run_start[at])
        path.append(np.arange(start, at + 1))
        at = int(forest.parent[start])
    return np.concatenate([*reversed(path), np.empty(0, dtype=np.int64)])


def tensor(array: Ints, device: torch.device) -> Tensor:
    return torch.tensor(array, dtype=torch.int64, device=device)
