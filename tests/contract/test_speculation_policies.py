"""What every policy of the speculation slot must do, and where drafting breaks even."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.policies import AnySpeculation, CostAware, Fixed
from forge.policies.speculation import DraftView
from forge.types import ForgeError

SPECULATIONS = get_args(get_args(AnySpeculation)[0])


@pytest.mark.parametrize("cls", SPECULATIONS)
@given(data=st.data(), most=st.integers(1, 6))
def test_a_depth_is_one_of_the_views_and_pure(cls: type[Any], data: st.DataObject, most: int) -> None:
    gains = data.draw(st.lists(st.floats(0, 1), min_size=most, max_size=most))
    costs = data.draw(st.lists(st.floats(1e-4, 1.0), min_size=most + 1, max_size=most + 1))
    view = DraftView(
        rows=data.draw(st.integers(1, 500)), tokens=tuple(accumulate(gains, initial=1.0)), step_s=tuple(costs)
    )
    policy = cls(tokens=data.draw(st.integers(1, most))) if cls is Fixed else cls()
    chosen = policy.depth(view)
    assert chosen in range(most + 1)
    assert policy.depth(view) == chosen == replace(policy).depth(view)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.1, 2.0), st.floats(0, 0.5))
def test_cost_aware_stops_where_the_step_costs_as_much_as_it_gains(
    acceptance: list[float], each: float, margin: float
) -> None:
    """A step of depth k costs 1 + k * each: as soon as `each` is above the acceptance, none is drafted."""
    tokens = tuple(accumulate(accumulate(acceptance, mul), initial=1.0))
    view = DraftView(rows=1, tokens=tokens, step_s=tuple(1.0 + k * each for k in range(len(tokens))))
    chosen = CostAware(margin=margin).depth(view)
    rates = [t / s for t, s in zip(view.tokens, view.step_s, strict=True)]
    if chosen:
        assert rates[chosen] == max(rates) > (1 + margin) * rates[0]
    else:
        assert max(rates) <= (1 + margin) * rates[0]
    if each > max(acceptance):
        assert chosen == 0


def test_a_head_that_drafts_less_than_is_asked_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"tokens = 3: the head drafts 1"):
        Fixed(tokens=3).depth(DraftView(rows=1, tokens=(1.0, 1.5), step_s=(1.0, 1.1)))
