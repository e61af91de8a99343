"""Cuts are the cheapest there are, keep the budget, and lose no sequence."""

from __future__ import annotations

from itertools import product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from forge.forest import Forest
from forge.train import planner

few = st.lists(st.lists(st.integers(0, 2), max_size=10), max_size=9)


def cheapest(forest: Forest, sequences: Any, budget: int) -> int | None:
    """The fewest tokens of any cutting of the sorted sequences, by trying all; None where one alone is too long."""
    order = [i for i in forest.order.tolist() if sequences[i]]
    best = None
    for cuts in product([False, True], repeat=max(0, len(order) - 1)):
        groups = [[order[0]]]
        for i, cut in zip(order[1:], cuts, strict=True):
            groups.append([i]) if cut else groups[-1].append(i)
        sizes = [len(Forest.of([sequences[i] for i in group])) for group in groups]
        if max(sizes) <= budget:
            best = sum(sizes) if best is None else min(best, sum(sizes))
    return best


@settings(max_examples=150, deadline=None)
@given(few, st.integers(1, 40), st.integers(1, 4))
def test_plan(sequences: Any, budget: int, at_least: int) -> None:
    forest = Forest.of(sequences)
    parts = planner.plan(forest, budget, at_least)
    assert sorted(i for part in parts for i in part.sequences) == [i for i, s in enumerate(sequences) if s]
    for part in parts:
        assert part.tokens == len(Forest.of([sequences[i] for i in part.sequences]))
        bounds = part.bounds()
        assert [t for a, b in bounds for t in range(a, b)] == list(range(part.tokens))
        assert max(b - a for a, b in bounds) <= budget
        assert part.chunks == 1 or part.tokens > budget
    if not parts:
        return
    tokens, best = sum(part.tokens for part in parts), cheapest(forest, sequences, budget)
    if best is not None:
        spare = max(planner.SPARE * best, planner.FEW) if at_least > 1 else 0
        assert tokens <= best + spare
        work = sum((planner.CUT if part.chunks == 1 else planner.STREAMED) * part.tokens for part in parts)
        assert work <= planner.CUT * (best + spare)


def test_a_shared_prefix_longer_than_the_budget_is_streamed_and_not_forwarded_for_each() -> None:
    stem = list(range(100))
    forest = Forest.of([[*stem, 200 + i] for i in range(8)])
    (part,) = planner.plan(forest, 50)
    assert part.tokens == 108
    assert part.chunks == 3


def test_more_parts_where_they_cost_little() -> None:
    apart = Forest.of([[i] * 20 for i in range(6)])
    assert len(planner.plan(apart, 1000, at_least=3)) == 3
    together = Forest.of([[*range(500), 1000 + i] for i in range(6)])
    assert len(planner.plan(together, 1000, at_least=3)) == 1, "cutting would forward the stem three times"
    few = Forest.of([[*range(50), 100 + i] for i in range(6)])
    assert len(planner.plan(few, 1000, at_least=3)) == 3, "a stem this short is lost in the cost of a forward pass"


def test_cuts_fall_between_groups() -> None:
    groups = [[[g, *range(10), 20 + i] for i in range(4)] for g in range(3)]
    forest = Forest.of([s for group in groups for s in group])
    parts = planner.plan(forest, 20)
    assert [sorted(part.sequences) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sum(part.tokens for part in parts) == len(forest)


def test_nothing_to_plan() -> None:
    assert planner.plan(Forest.of([]), 10) == []
    assert planner.plan(Forest.of([[], []]), 10) == []
