"""An optimiser batch split over ranks: equal work for each, and prefixes forwarded on as few ranks as can be.

In sorted order, sequences that share a prefix are neighbours, so each rank takes one run of them. What two ranks share
is forwarded by both: at most one prefix per cut. Ranks then go through their parts in rounds, together, because every
pass is a collective operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from forge.forest import Forest
from forge.train import microbatch, planner
from forge.train.microbatch import forward_length
from forge.train.planner import Part
from forge.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One rank's samples; what the loss tokens of each are divided by; its micro-batches, which list the samples by
    their place in `samples`. The ones in most chunks come first."""

    samples: tuple[TrainSample, ...]
    denominators: tuple[float, ...]
    parts: tuple[Part, ...]


def split(
    samples: Sequence[TrainSample], denominators: Sequence[float], ranks: int, budget: int, *, merge: bool
) -> list[Portion]:
    """A portion for each rank; some are empty where there are fewer samples than ranks.

    `budget` bounds the tokens that a rank forwards at once, as in `planner.plan` or `microbatch.plan`.
    """
    lengths = [forward_length(sample) for sample in samples]
    if merge:
        runs = balanced(Forest.of([microbatch.inputs(sample) for sample in samples]), ranks)
    else:
        longest = sorted(range(len(samples)), key=lambda i: -lengths[i])
        runs = [longest[rank::ranks] for rank in range(ranks)]
    portions = []
    for run in runs:
        mine = tuple(samples[i] for i in run)
        if merge:
            parts = planner.plan(Forest.of([microbatch.inputs(sample) for sample in mine]), budget)
        else:
            own = [lengths[i] for i in run]
            parts = [Part(tuple(b), sum(own[i] for i in b)) for b in microbatch.plan(own, budget, 1)]
        parts.sort(key=lambda part: (-part.chunks, -part.tokens))
        portions.append(Portion(samples=mine, denominators=tuple(denominators[i] for i in run), parts=tuple(parts)))
    return portions


def rounds(portions: Sequence[Portion]) -> list[int]:
    """In how many chunks each round is forwarded, one part a rank: at least one round, even of an empty batch."""
    by_rank = [[part.chunks for part in portion.parts] for portion in portions]
    return [max(chunks) for chunks in zip_longest(*by_rank, fillvalue=1)] or [1]


def balanced(forest: Forest, ranks: int) -> list[list[int]]:
    """Runs of the sorted sequences, one a rank, whose largest number of distinct tokens is the least there is."""
    order, lengths, shared = forest.in_order
    if not order:
        return [[] for _ in range(ranks)]
    fresh = [length - common for length, common in zip(lengths, shared, strict=True)]
    low, high = max(lengths), len(forest)
    while low < high:  # the fewest runs under a cap are those filled greedily
        middle = (low + high) // 2
        if len(_filled(lengths, fresh, middle)) <= ranks:
            high = middle
        else:
            low = middle + 1
    starts = _filled(lengths, fresh, high)
    runs = [order[a:b] for a, b in zip(starts, [*starts[1:], len(order)], strict=True)]
    return runs + [[] for _ in range(ranks - len(runs))]


def _filled(lengths: Sequence[int], fresh: Sequence[int], cap: int) -> list[int]:
    """Where runs begin if each takes sequences as long as it has at most `cap` distinct tokens.

    `fresh[j]` tokens of sequence j are not in the one before it.
    """
    starts, tokens = [0], lengths[0]
    for j in range(1, len(lengths)):
        tokens += fresh[j]
        if tokens > cap:
            starts.append(j)
            tokens = lengths[j]
    return starts
