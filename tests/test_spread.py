"""The spread between scaffolds: what it is, what noise makes of it, what it refuses."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.metrics.spread import gains, means, spread
from forge.types import ForgeError


def scores(*rates: float, tasks: int = 200) -> dict[str, dict[str, float]]:
    """A scaffold per rate, whose tasks are solved so often."""
    rng = Random(0)
    return {f"s{i}": {f"t{n}": float(rng.random() < rate) for n in range(tasks)} for i, rate in enumerate(rates)}


def test_scaffolds_that_differ_are_told_from_noise() -> None:
    apart, alike = spread(scores(0.1, 0.5, 0.9)), spread(scores(0.5, 0.5, 0.5))
    assert apart is not None
    assert alike is not None
    assert apart.sd > 0.3
    assert apart.low > 3 * apart.sd_if_alike
    assert (apart.least, apart.most) == ("s0", "s2")
    assert alike.sd < 2.5 * alike.sd_if_alike


def test_gains_are_over_the_first_and_paired() -> None:
    table = scores(0.2, 0.2, 0.8)
    table["s1"] = dict(table["s0"])
    found = gains(table)
    assert list(found) == ["s1", "s2"]
    assert (found["s1"].mean, found["s1"].low, found["s1"].high) == (0.0, 0.0, 0.0)
    assert found["s2"].low > 0.4


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.integers(1, 12))
def test_means_lie_within_their_bounds_and_alone_there_is_no_spread(rates: list[float], tasks: int) -> None:
    table = scores(*rates, tasks=tasks)
    for name, one in means(table, resamples=50).items():
        assert one.mean == pytest.approx(sum(table[name].values()) / tasks)
        assert 0.0 <= one.low <= one.high <= 1.0
    assert (spread(table, resamples=50) is None) == (len(rates) == 1)


def test_other_tasks_are_refused() -> None:
    with pytest.raises(ForgeError, match="same tasks"):
        means({"a": {"t": 1.0}, "b": {"u": 1.0}})
    with pytest.raises(ForgeError, match="one at least"):
        means({"a": {}})
