"""Splitting samples into padded micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.train.microbatch import build, forward_length, plan
from forge.types import TrainSample

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


def test_build_points_every_loss_token_at_the_position_before_it(
    make_samples: Callable[..., list[TrainSample]],
) -> None:
    samples = make_samples(3, 5)
    micro = build(samples, [float(b) for b in range(5)], torch.device("cpu"), torch.float64)
    width = micro.input_ids.shape[1]
    n = 0
    for b, sample in enumerate(samples):
        for t, on in enumerate(sample.loss):
            if on:
                assert micro.rows[n] == b * width + t - 1
                assert micro.input_ids.flatten()[micro.rows[n]] == sample.token_ids[t - 1]
                assert micro.targets[n] == sample.token_ids[t]
                assert micro.rollout_logprobs[n] == sample.logprobs[t]
                assert micro.advantages[n] == sample.advantages[t]
                assert micro.temperature[n] == sample.temperature
                assert micro.denominator[n] == b
                n += 1
    assert n == len(micro.rows) == len(micro.targets)
