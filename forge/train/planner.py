"""Cutting a forest into micro-batches under a token budget with little forwarded twice.

In sorted order a cut before sequence k forwards again just what k shares with its predecessor, so the best cuts are a
shortest-path problem. Where prefixes are so long that any cuts cost more than that, or one sequence alone exceeds the
budget, the forest is streamed instead (`forge.train.streaming`): in chunks of the budget, each forwarded once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forge.forest import Forest

#: Work of one token: forward 1, backward 2; streamed, one forward more.
CUT, STREAMED = 3.0, 4.0
#: Extra tokens accepted to have as many micro-batches as the caller would like: a share, or so few that they are
#: lost in what a forward pass costs anyway.
SPARE, FEW = 0.05, 256


@dataclass(frozen=True, slots=True)
class Part:
    """Sequences of one micro-batch and its distinct tokens; `chunks`: how many forward passes it takes, 1 unless it is
    streamed."""

    sequences: tuple[int, ...]
    tokens: int
    chunks: int = 1

    def bounds(self) -> list[tuple[int, int]]:
        """(first, one past the last) token of each chunk, of nearly equal size."""
        edges = [self.tokens * i // self.chunks for i in range(self.chunks + 1)]
        return list(pairwise(edges))


def plan(forest: Forest, budget: int, at_least: int = 1) -> list[Part]:
    """Parts that together hold every non-empty sequence once. None forwards more than `budget` tokens at a time.

    `at_least`: as many parts as that, if they cost few tokens more and the sequences allow.
    """
    order, lengths, shared = forest.in_order
    if not order:
        return []
    parts = _cut(order, lengths, shared, budget)
    tokens = sum(part.tokens for part in parts)
    work = sum((CUT if part.chunks == 1 else STREAMED) * part.tokens for part in parts)
    if work > STREAMED * len(forest) and len(forest) > budget:
        return [Part(tuple(order), len(forest), -(-len(forest) // budget))]
    if len(parts) < at_least:
        finer = _at_least(order, lengths, shared, min(budget, tokens), at_least)
        if sum(part.tokens for part in finer) <= tokens + max(SPARE * tokens, FEW):
            parts = finer
    return [Part(p.sequences, p.tokens, -(-p.tokens // budget)) for p in parts]


def _at_least(
    order: Sequence[int], lengths: Sequence[int], shared: Sequence[int], budget: int, wanted: int
) -> list[Part]:
    """Cut under the largest budget up to `budget` that gives as many parts as `wanted`, by bisection."""
    low, high = 1, budget
    while low < high:
        middle = (low + high + 1) // 2
        if len(_cut(order, lengths, shared, middle)) >= wanted:
            low = middle
        else:
            high = middle - 1
    return _cut(order, lengths, shared, low)


def _cut(order: Sequence[int], lengths: Sequence[int], shared: Sequence[int], budget: int) -> list[Part]:
    """The partition of the sorted sequences into runs of at most `budget` tokens with the fewest tokens in all.

    With S_j the distinct tokens up to j, the run i..j has `lengths[i] + S_j - S_i` of them, which falls as i grows: the
    runs that end at j and fit begin in a sliding window, whose minimum a monotone queue keeps. O(n).
    """
    total, sums = 0, []
    for length, common in zip(lengths, shared, strict=True):
        total += length - common
        sums.append(total)
    best, came = [0] * (len(order) + 1), [0] * len(order)
    window: deque[tuple[int, int]] = deque()  # (value, i), values rising
    for j in range(len(order)):
        value = best[j] + lengths[j] - sums[j]
        while window and window[-1][0] > value:  # of equal cuts the fewest
            window.pop()
        window.append((value, j))
        while window[0][1] < j and lengths[window[0][1]] + sums[j] - sums[window[0][1]] > budget:
            window.popleft()
        best[j + 1], came[j] = window[0][0] + sums[j], window[0][1]
    parts, end = [], len(order)
    while end:
        start = came[end - 1]
        tokens = lengths[start] + sums[end - 1] - sums[start]
        parts.append(Part(tuple(order[start:end]), tokens, -(-tokens // budget)))
        end = start
    return parts[::-1]
