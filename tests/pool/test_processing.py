from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_support import trajectory
from pydantic import TypeAdapter, ValidationError

from forge.processing import (
    AnyBatcher,
    AnyProcessor,
    ByItems,
    ByTokens,
    Chain,
    DropZeroVariance,
    MaxTokens,
    Survivors,
    longest_context,
)
from forge.train.samples import batch_samples
from forge.types import ForgeError, Trajectory


def group(position: int, *rewards: float | None) -> list[Trajectory]:
    """One member for each reward; None: it died."""
    return [trajectory(position, m, reward=reward, alive=reward is not None) for m, reward in enumerate(rewards)]


def test_survivors() -> None:
    silent = replace(group(1, 1.0)[0], completions=())
    whole = group(0, 1.0, 0.0)
    assert Survivors().process([whole, [*group(1, 1.0, None), silent], group(2, None, 0.5, 0.5)]) == [
        whole,
        group(2, None, 0.5, 0.5)[1:],
    ]
    assert Survivors(least=1).process([group(1, 1.0, None)]) == [group(1, 1.0)]


def test_what_survives_can_be_trained_on() -> None:
    silent = replace(group(0, 1.0)[0], completions=())
    groups = Survivors().process([[silent, *group(0, 1.0)], group(1, 1.0, 0.0, None)])
    assert {sample.position for sample in batch_samples(groups)} == {1}


def test_zero_variance_groups_contribute_nothing() -> None:
    kept = group(1, 0.0, 1.0, None)
    assert DropZeroVariance().process([group(0, 1.0, 1.0), kept, group(2, 0.5, 0.5, None), group(3)]) == [kept]


def test_max_tokens_counts_the_longest_context() -> None:
    short, long = trajectory(0, 0, turns=1), trajectory(0, 1, turns=2)
    assert (longest_context(short), longest_context(long)) == (8, 12)
    assert MaxTokens(limit=12).process([[short, long]]) == [[short, long]]
    assert MaxTokens(limit=11, least=1).process([[short, long]]) == [[short]]
    assert MaxTokens(limit=11).process([[short, long]]) == []


def test_a_chain_runs_in_order() -> None:
    chain = Chain(steps=(Survivors(), DropZeroVariance()))
    kept = group(1, 0.0, 1.0)
    assert chain.process([group(0, None, 1.0), [*kept, trajectory(1, 2, alive=False)], group(2, 1.0, 1.0)]) == [kept]


SIZES = st.lists(st.integers(0, 20))


@given(SIZES, st.integers(1, 25))
def test_token_batches_keep_order_and_budget(sizes: list[int], budget: int) -> None:
    units = list(enumerate(sizes))
    batches = ByTokens(budget=budget).split(units, lambda unit: unit[1])
    assert [unit for batch in batches for unit in batch] == units
    assert all(batches)
    for batch in batches:
        assert len(batch) == 1 or sum(size for _, size in batch) <= budget
    for left, right in itertools.pairwise(batches):
        assert sum(size for _, size in left) + right[0][1] > budget  # no batch is cut early


@given(SIZES, st.integers(1, 5))
def test_item_batches_keep_order_and_count(sizes: list[int], items: int) -> None:
    batches = ByItems(items=items).split(sizes, lambda size: size)
    assert [size for batch in batches for size in batch] == sizes
    assert all(len(batch) == items for batch in batches[:-1])
    assert all(batches)


def test_chosen_by_kind() -> None:
    data = {"kind": "chain", "steps": [{"kind": "survivors"}, {"kind": "max_tokens", "limit": 9}]}
    chosen = TypeAdapter(AnyProcessor).validate_python(data)
    assert chosen == Chain(steps=(Survivors(), MaxTokens(limit=9)))
    assert TypeAdapter(AnyBatcher).validate_python({"kind": "by_tokens", "budget": 7}) == ByTokens(budget=7)
    with pytest.raises(ValidationError, match="limti"):
        TypeAdapter(AnyProcessor).validate_python({"kind": "max_tokens", "limit": 9, "limti": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByItems(items=0), "items = 0"),
        (lambda: ByTokens(budget=-1), "budget = -1"),
        (lambda: MaxTokens(limit=0), "limit = 0"),
        (lambda: Survivors(least=0), "least = 0"),
    ],
)
def test_impossible_numbers(make: object, message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        make()  # type: ignore[operator]
