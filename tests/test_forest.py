"""Forests against a trie of dictionaries, and the shapes that break builders."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge.forest import Forest, ForestError

few_tokens = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


def prefixes(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}


def prefix_of(forest: Forest, node: int) -> tuple[int, ...]:
    out: list[int] = []
    while node >= 0:
        out.append(int(forest.tokens[node]))
        node = int(forest.parent[node])
    return tuple(reversed(out))


@settings(max_examples=300, deadline=None)
@given(few_tokens)
@example([])
@example([[]])
@example([[1], [], [1], [1, 1]])
def test_each_distinct_prefix_is_one_token(sequences: list[list[int]]) -> None:
    forest = Forest.of(sequences)
    named = [prefix_of(forest, node) for node in range(len(forest))]
    assert len(set(named)) == len(named)
    assert set(named) == prefixes(sequences)
    assert [len(p) - 1 for p in named] == forest.depth.tolist()
    for i, sequence in enumerate(sequences):
        nodes = forest.nodes_of(i)
        assert [named[node] for node in nodes] == [tuple(sequence[: n + 1]) for n in range(len(sequence))]
    assert forest.multiplicity.tolist() == [sum(s[: len(p)] == list(p) for s in sequences) for p in named]


@settings(max_examples=300, deadline=None)
@given(few_tokens)
def test_end_says_who_sees_whom(sequences: list[list[int]]) -> None:
    forest = Forest.of(sequences)
    named = [prefix_of(forest, node) for node in range(len(forest))]
    for q, query in enumerate(named):
        for k, key in enumerate(named):
            sees = k <= q < forest.end[k]
            assert sees == (query[: len(key)] == key), (query, key)
    assert forest.pairs == forest.dense_mask().sum()
    assert forest.flat_pairs == sum(len(s) * (len(s) + 1) // 2 for s in sequences)


@settings(max_examples=200, deadline=None)
@given(few_tokens)
def test_segments_are_the_longest_runs_without_a_branch(sequences: list[list[int]]) -> None:
    forest = Forest.of(sequences)
    runs = forest.segments
    assert [t for a, b in zip(runs.start, runs.stop, strict=True) for t in range(a, b)] == list(range(len(forest)))
    children = np.bincount(forest.parent[forest.parent >= 0], minlength=len(forest))
    for a, b, below in zip(runs.start, runs.stop, runs.below, strict=True):
        assert all(children[t] == 1 and forest.parent[t + 1] == t for t in range(a, b - 1))
        assert children[b - 1] != 1, "a run stops only where its last token branches or ends"
        assert below == forest.end[a] == forest.end[b - 1]
    assert sum(
        (b - a) * (b - a + 1) // 2 + (b - a) * (e - b)
        for a, b, e in zip(runs.start, runs.stop, runs.below, strict=True)
    ) == (forest.pairs)


@settings(max_examples=100, deadline=None)
@given(few_tokens, st.data())
def test_an_extra_key_keeps_equal_tokens_apart(sequences: list[list[int]], data: st.DataObject) -> None:
    keys = [data.draw(st.lists(st.integers(0, 1), min_size=len(s), max_size=len(s))) for s in sequences]
    both = [[2 * t + k for t, k in zip(s, ks, strict=True)] for s, ks in zip(sequences, keys, strict=True)]
    forest, oracle = Forest.of(sequences, keys), Forest.of(both)
    assert forest.extra is not None
    # Sorted otherwise, so compared by content.
    found = [(2 * forest.tokens + forest.extra)[forest.nodes_of(i)].tolist() for i in range(len(both))]
    assert found == both
    assert len(forest) == len(oracle)


def test_neighbours_share_what_they_say() -> None:
    forest = Forest.of([[1, 2, 3], [5], [1, 2, 4], [1, 2]])
    assert forest.order.tolist() == [3, 0, 2, 1]
    assert forest.shared.tolist() == [0, 2, 2, 0]
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5]
    assert forest.end.tolist() == [4, 4, 3, 4, 5]


@pytest.mark.parametrize(
    ("sequences", "unique"),
    [
        ([np.arange(200_000)], 200_000),
        ([np.arange(n) for n in range(1, 2001)], 2000),
        ([[7, i] for i in range(1000)], 1001),
        ([[3]] * 5, 1),
    ],
    ids=["one long", "nested", "thousand ways", "equal"],
)
def test_shapes_that_break_builders(sequences: list[np.ndarray], unique: int) -> None:
    forest = Forest.of(sequences)
    assert len(forest) == unique
    assert all(np.array_equal(forest.tokens[forest.nodes_of(i)], s) for i, s in enumerate(sequences[:50]))


def test_a_million_tokens_build_in_seconds() -> None:
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 1 << 40, (1000, 60))
    sequences = [np.concatenate([prompts[i % 1000], rng.integers(0, 1 << 40, 65)]) for i in range(8000)]
    began = time.process_time()
    forest = Forest.of(sequences)
    seconds = time.process_time() - began
    assert forest.flat == 1_000_000
    assert len(forest) == 1000 * 60 + 8000 * 65
    assert seconds < 5, "about a second is what it takes; a loop over tokens would take minutes"


@pytest.mark.parametrize(
    ("sequences", "extra", "complaint"),
    [
        ([[1, -2]], None, "sequence 0: holds -2"),
        ([[[1]]], None, "sequence 0: must be flat"),
        ([[1.5]], None, "sequence 0: must hold integers"),
        ([[1, 2]], [[0]], "exactly one a token"),
        ([[1]], [[0.5]], "extra key 0: must hold integers"),
    ],
)
def test_what_is_no_token_list_is_refused(sequences: list[list[int]], extra: list[list[int]], complaint: str) -> None:
    with pytest.raises(ForestError, match=complaint):
        Forest.of(sequences, extra)
