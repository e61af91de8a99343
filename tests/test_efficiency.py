"""J as an interval: the model by hand, its place in the summary of both worlds, what may be said of groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_metrics import RULED, story
from worlds import scenario, trace_of

from forge import trace as ev
from forge.metrics import summarise
from forge.metrics.efficiency import bounds
from forge.metrics.intervals import gain_interval
from forge.report.comparison import Group, best_by_j, j_interval
from forge.sections import Efficiency
from forge.types import ForgeError, Json


def test_the_ends_by_hand() -> None:
    model = Efficiency(per_lag_step=(0.0, 0.1), per_excess=(0.0, 1.0))
    assert bounds(model, 0.0, 1.0) == (1.0, 1.0)
    assert bounds(model, 5.0, 2.0) == (pytest.approx(1 / 3), 1.0)
    assert bounds(Efficiency(per_lag_step=(0.1, 0.1), per_excess=(1.0, 3.0)), 10.0, 1.5) == (
        pytest.approx(1 / (2 * 2.5)),
        pytest.approx(1 / (2 * 1.5)),
    )
    assert bounds(model, 0.0, 0.2) == (1.0, 1.0), "less unrest than chance gains nothing"


RANGE = st.tuples(st.floats(0, 5), st.floats(0, 5)).map(sorted).map(tuple)


@given(lag=RANGE, excess=RANGE, at=st.tuples(st.floats(0, 50), st.floats(0, 9)), more=st.floats(0, 9))
def test_it_is_an_interval_that_only_falls(lag: Any, excess: Any, at: tuple[float, float], more: float) -> None:
    model = Efficiency(per_lag_step=lag, per_excess=excess)
    low, high = bounds(model, *at)
    assert 0 < low <= high <= 1
    for worse in ((at[0] + more, at[1]), (at[0], at[1] + more)):
        assert bounds(model, *worse) <= (low, high)


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ({"per_lag_step": [0.2, 0.1]}, r"efficiency.per_lag_step = \[0.2, 0.1\]: a range begins with its lower end"),
        ({"per_excess": [-1, 1]}, r"efficiency.per_excess.0 = -1: .*greater than or equal to 0"),
        ({"per_step": [0, 1]}, r"efficiency.per_step: unknown key"),
    ],
)
def test_a_wrong_table_is_a_users_error(table: Json, complaint: str) -> None:
    with pytest.raises(ForgeError, match=complaint):
        scenario(efficiency=table)


def test_j_of_a_story() -> None:
    """Mean lag 1.5 items of batches of 2; 10 trained tokens a second."""
    given_scenario = RULED.model_copy(update={"efficiency": Efficiency(per_lag_step=(0.0, 1.0), per_excess=(0.0, 0.0))})
    summary = summarise(story(), given_scenario)
    assert summary["sample_efficiency_model"] == {"low": pytest.approx(1 / 1.75), "high": 1.0}
    assert summary["j_tokens"] == {"low": pytest.approx(10 / 1.75), "high": pytest.approx(10.0)}
    assert summary["j_reward_per_s"] == {"mean": pytest.approx(0.025), "low": None, "high": None, "n": 1}
    assert "no spread" in summary["null_reasons"]["j_reward_per_s.low"]
    assert {"j_tokens", "j_reward_per_s", "sample_efficiency_model"} <= set(summary["estimators"])


def test_a_gain_has_bounds_where_its_ends_have_spread() -> None:
    got = gain_interval([0.1, 0.3], [0.6, 1.0])
    assert (got.mean, got.n) == (pytest.approx(0.6), 2)
    # Pooled variance (0.02 + 0.08) / 2 = 0.05, two degrees of freedom.
    assert got.high - got.mean == pytest.approx(4.303 * math.sqrt(0.05))
    assert got.mean - got.low == pytest.approx(got.high - got.mean)
    assert not gain_interval([0.1], [0.2]).is_bounded


def test_both_worlds_have_the_parts_of_j_or_say_why_not() -> None:
    keys = ("j_tokens", "j_reward_per_s", "update_variance", "plateau_distance", "yield_J")
    for world in ("live", "sim"):
        summary = summarise(trace_of(scenario(), world=world), scenario())
        for key in keys:
            assert summary[key] is not None or summary["null_reasons"][key]
        assert summary["j_tokens"]["low"] < summary["j_tokens"]["high"] <= summary["trained_tokens_per_s"]
        assert (summary["j_reward_per_s"] is None) == (world == "sim")
        assert {"update_variance", "plateau_distance"} <= set(summary["estimators"])
    without = [replace(e, metrics={}) if isinstance(e, ev.Committed) else e for e in trace_of(scenario(), world="sim")]
    assert "no gradient" in summarise(without, scenario())["null_reasons"]["update_variance"]


def group(name: str, *ranges: tuple[float, float]) -> Group:
    j = j_interval([{"j_tokens": {"low": low, "high": high}} for low, high in ranges])
    assert j is not None
    return Group(name=name, seeds=(), measured={"j_tokens": j}, predicted={}, law_violations=0)


def test_no_winner_by_j_where_intervals_overlap_or_seeds_are_few() -> None:
    slow, close = group("slow", (90.0, 100.0), (91.0, 101.0)), group("close", (95.0, 110.0), (96.0, 111.0))
    fast = group("fast", (900.0, 950.0), (901.0, 951.0))
    assert slow.measured["j_tokens"].low < 90.0
    assert slow.measured["j_tokens"].high > 101.0
    assert best_by_j([slow, close]) is None
    assert best_by_j([slow, close, fast]) == "fast"
    assert best_by_j([slow, group("one seed", (900.0, 950.0))]) is None
    assert j_interval([{"j_tokens": None}, {"j_tokens": {"low": 1.0, "high": 2.0}}]) is None
