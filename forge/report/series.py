"""Series behind the plots: what a run's records say over time. Arrays in, arrays out; no drawing."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forge.metrics import ItemRecord, RunFold
from forge.metrics.stats import Array

#: an item's states in the picture of the queue, in the order it may pass them
STATES = ("running", "blocked", "finished", "taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An item was in `state` from `start_s` to `end_s`."""

    position: int
    state: str
    start_s: float
    end_s: float


def spans(run: RunFold, window: int | None) -> list[Span]:
    """Every item's states: running; finished outside the window (blocked), inside it; taken until committed."""
    heads = Heads(run.heads)
    committed = {s.step: s.committed_s for s in run.steps}
    found: list[Span] = []
    for item in run.items.values():
        marks = [("running", item.submitted_s)]
        if item.finished_s is not None:
            visible = _visible_s(item, window, heads)
            marks += [("blocked", item.finished_s), ("finished", max(item.finished_s, visible))]
        if item.taken_s is not None:
            marks.append(("taken", item.taken_s))
        end = next(t for t in (item.dead_s, committed.get(item.step or -1), run.wall_s) if t is not None)
        stops = [t for _, t in marks[1:]] + [end]
        for (state, start), stop in zip(marks, stops, strict=True):
            if min(stop, end) > start:
                found.append(Span(position=item.position, state=state, start_s=start, end_s=min(stop, end)))
    return found


def _visible_s(item: ItemRecord, window: int | None, heads: Heads) -> float:
    """When the window first reached the item after it finished; infinity if it never did."""
    finished = item.finished_s or 0.0
    return finished if window is None else heads.reached_s(item.position - window + 1, finished)


class Heads:
    """The queue's head over time: `moves` are (seconds, head from then on). It falls only where a life begins, so a
    question takes a binary search a life."""

    def __init__(self, moves: Sequence[tuple[float, int]]) -> None:
        self._times = [t for t, _ in moves]
        self._heads = [head for _, head in moves]
        falls = (i for i in range(1, len(moves)) if self._heads[i] < self._heads[i - 1])
        self._ends = [*falls, len(moves)]  # of lives

    def reached_s(self, head: int, since_s: float) -> float:
        """When it first was at `head` or beyond from `since_s` on; infinity: never."""
        now = max(0, bisect_right(self._times, since_s) - 1)
        start = now
        for end in self._ends[bisect_right(self._ends, now) :]:
            found = bisect_left(self._heads, head, start, end)
            if found < end:
                return since_s if found == now else self._times[found]
            start = end
        return math.inf


def counts(found: list[Span], grid: Array) -> dict[str, Array]:
    """How many items are in each state at every time of `grid`."""
    result = {}
    for state in STATES:
        starts = np.sort([s.start_s for s in found if s.state == state])
        ends = np.sort([s.end_s for s in found if s.state == state])
        result[state] = np.searchsorted(starts, grid, "right") - np.searchsorted(ends, grid, "right")
    return {state: n.astype(np.float64) for state, n in result.items()}


def head_at(run: RunFold, grid: Array) -> Array:
    """The queue's head at every time of `grid`."""
    times = np.array([t for t, _ in run.heads])
    heads = np.array([head for _, head in run.heads], dtype=np.float64)
    return heads[np.maximum(0, np.searchsorted(times, grid, side="right") - 1)]


def instance_shares(run: RunFold, edges: Array) -> Array:
    """Busy share of every instance [instances, edges - 1]. Counters are interpolated."""
    times = [0.0] + [t for t, _ in run.instance_usage]
    busy = np.array([(0.0,) * len(run.instance_usage[0][1]), *(b for _, b in run.instance_usage)])
    shares: Array = np.array([np.diff(np.interp(edges, times, column)) for column in busy.T]) / np.diff(edges)
    return shares


def cached_shares(run: RunFold, edges: Array) -> Array:
    """Of the prompt tokens sent between consecutive edges, the share believed cached; NaN: none sent."""
    times, tokens, cached = np.array(run.prompts, dtype=np.float64).reshape(-1, 3).T
    sent, _ = np.histogram(times, edges, weights=tokens)
    held, _ = np.histogram(times, edges, weights=cached)
    shares: Array = np.divide(held, sent, out=np.full(len(sent), np.nan), where=sent > 0)
    return shares


def busy_shares(run: RunFold, instances: int, edges: Array) -> tuple[Array, Array]:
    """Engine and trainer busy shares between consecutive edges. The engine's counters are interpolated."""
    width = np.diff(edges)
    times = [0.0] + [t for t, _ in run.usage]
    busy = [0.0] + [b for _, b in run.usage]
    engine = np.diff(np.interp(edges, times, busy)) / (width * instances)
    trainer = np.zeros(len(width))
    for start, end in run.trainer_spans:
        trainer += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0.0, None)
    return engine, trainer / width
