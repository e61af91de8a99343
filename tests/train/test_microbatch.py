"""Splitting samples into padded micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.forest import Forest
from forge.train.microbatch import MicroBatch, forward_length, inputs, merged, padded, plan
from forge.train.planner import Part
from forge.types import TrainSample

Place = Callable[[int, int], int]

lengths = st.lists(st.integers(1, 60), max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 200), st.integers(1, 6))
def test_plan(sizes: list[int], budget: int, at_least: int) -> None:
    batches = plan(sizes, budget, at_least)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        longest = max(sizes[i] for i in batch)
        assert len(batch) == 1 or len(batch) * longest <= budget
    order = [sizes[i] for batch in batches for i in batch]
    assert order == sorted(order, reverse=True)
    # The promised number comes out unless single samples are longer than their share.
    if sizes and max(sizes) <= sum(sizes) // at_least:
        assert len(batches) >= at_least


def test_forward_length_stops_before_the_last_loss_token() -> None:
    def sample(*loss: bool) -> TrainSample:
        zeros = (0.0,) * len(loss)
        ids = tuple(range(len(loss)))
        return TrainSample(position=0, member=0, token_ids=ids, loss=loss, logprobs=zeros, advantages=zeros)

    assert forward_length(sample(False, True, False, True, False, False)) == 3
    assert forward_length(sample(False, False)) == 0


def assert_points_at_the_position_before(micro: MicroBatch, samples: list[TrainSample], place: Place) -> None:
    """`place(b, t)` is where token t of sample b stands among the flattened hidden states."""
    n = 0
    for b, sample in enumerate(samples):
        for t, on in enumerate(sample.loss):
            if on:
                row = micro.row_of[n]
                assert micro.rows[row] == place(b, t - 1)
                assert micro.input_ids.flatten()[micro.rows[row]] == sample.token_ids[t - 1]
                assert micro.row_temperature[row] == sample.temperature
                assert micro.targets[n] == sample.token_ids[t]
                assert micro.rollout_logprobs[n] == sample.logprobs[t]
                assert micro.advantages[n] == sample.advantages[t]
                assert micro.denominator[n] == b
                n += 1
    assert n == len(micro.row_of) == len(micro.targets)
    assert len(micro.rows) == len(micro.row_temperature)


def test_padded(make_samples: Callable[..., list[TrainSample]]) -> None:
    samples = make_samples(3, 5)
    micro = padded(samples, [float(b) for b in range(5)], torch.device("cpu"), torch.float64)
    width = micro.input_ids.shape[1]
    assert_points_at_the_position_before(micro, samples, lambda b, t: b * width + t)
    assert len(micro.rows) == len(micro.targets)


def test_merged_rows_are_shared_by_what_shares_prefix_and_temperature(
    make_samples: Callable[..., list[TrainSample]],
) -> None:
    first, second = (make_samples(3, 5, temperature=t) for t in (1.0, 0.7))
    samples = [*first, *first, *second]
    forest = Forest.of([inputs(sample) for sample in samples])
    part = Part(tuple(range(len(samples))), len(forest))
    micro = merged(samples, [float(b) for b in range(15)], part, torch.device("cpu"), torch.float64)
    assert_points_at_the_position_before(micro, samples, lambda b, t: int(forest.nodes_of(b)[t]))
    loss_tokens = sum(sum(sample.loss) for sample in first)
    assert len(micro.targets) == 3 * loss_tokens
    assert len(micro.rows) == 2 * loss_tokens, "equal samples share their rows, other temperatures do not"
    assert micro.tokens == len(forest)
