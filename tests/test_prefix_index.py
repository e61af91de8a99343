"""The prefix index against what it says of itself, looked up afresh for every instance."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.prefix_index import PrefixIndex

INSTANCES, CHAINS = range(6), range(4)

told = st.tuples(st.sampled_from(INSTANCES), st.sampled_from(CHAINS), st.integers(0, 4))
crashed = st.tuples(st.sampled_from(INSTANCES))
paths = st.lists(st.tuples(st.sampled_from(CHAINS), st.integers(0, 4)), max_size=4, unique_by=lambda pair: pair[0])


@given(st.lists(told | crashed, max_size=30), st.lists(paths, min_size=1, max_size=3), st.sampled_from((1, 16)))
def test_a_match_is_the_farthest_that_is_held(
    steps: list[tuple[int, ...]], asked: list[list[tuple[int, int]]], block: int
) -> None:
    index = PrefixIndex()
    held: dict[tuple[int, int], int] = {}
    for step in steps:
        if len(step) == 3:
            instance, chain, blocks = step
            index.set(instance, chain, blocks)
            held[instance, chain] = blocks
        else:
            index.clear(step[0])
            held = {at: blocks for at, blocks in held.items() if at[0] != step[0]}
        for path in asked:
            expected = {i: tokens for i in INSTANCES if (tokens := farthest(held, i, path, block))}
            assert index.match(path, block) == expected
    assert len(index) == len({chain for (_, chain), blocks in held.items() if blocks})


def farthest(held: dict[tuple[int, int], int], instance: int, path: list[tuple[int, int]], block: int) -> int:
    """The last chain of the path that it holds some of counts, and all before it."""
    best = before = 0
    for chain, blocks in path:
        if stored := held.get((instance, chain), 0):
            best = before + min(stored, blocks)
        before += blocks
    return best * block
