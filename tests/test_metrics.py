"""Figures of hand-made traces with hand-computed values, and of random worlds against the laws."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import scenario, trace_of

from forge import trace as ev
from forge.metrics import LawCheck, fold, stats, summarise
from forge.metrics.intervals import mean_interval, paired_interval
from forge.queue import QueueShape
from forge.types import ForgeError, Json

RULED = scenario(
    queue={"n": 4, "batch": 2, "concurrency": 4, "group": 2},
    policy={"scheduler": {"kind": "windowed_fifo", "fraction": 0.5}},
    engine={"instances": 1},
)


def story() -> list[ev.Event]:
    """Two steps of two items, one death, on a clock of whole seconds. W = 2."""
    rows: list[ev.Event] = [ev.RunStarted(t=0.0, schema=1, world="live", scenario="tiny", seed=1)]
    for position, (domain, difficulty) in enumerate([("agent", 2.0), ("reasoning", 1.0), ("agent", 2.0)]):
        rows.append(submitted(0.0, position, domain, difficulty))
    rows += [
        ev.Routed(t=1.0, request="a", position=0, member=0, turn=0, prompt_tokens=10, instance=0),
        ev.FirstToken(t=1.5, request="a"),
        ev.Completed(t=2.5, request="a", tokens=5, finish="stop", versions=(0, 0)),
        member(3.0, 0, 0, 1.0),
        member(3.0, 0, 1, None),
        ev.Finished(t=3.0, position=0, tokens=10, reward=1.0),
        ev.Taken(t=3.0, position=0, lag_items=0),
        ev.Dead(t=4.0, position=1, reason="timeout", tokens=40),
        submitted(4.0, 3, "reasoning", 1.0),
        member(5.0, 2, 0, 0.0),
        member(5.0, 2, 1, 0.0),
        ev.Finished(t=5.0, position=2, tokens=20, reward=0.0),
        ev.Taken(t=5.0, position=2, lag_items=1),
        ev.StepStarted(t=5.0, step=1, positions=(0, 2)),
        submitted(5.0, 4, "agent", 4.0),
        committed(7.0, 1, (0, 2), tokens=30, variance=2.0),
        ev.Loaded(t=8.0, instance=0, version=1, io_s=0.5),
        ev.Published(t=8.0, version=1, step=1, items=2),
        ev.Finished(t=8.0, position=4, tokens=80, reward=1.0),
        ev.Taken(t=8.0, position=4, lag_items=2),
        ev.Finished(t=9.0, position=3, tokens=40, reward=0.5),
        ev.Taken(t=9.0, position=3, lag_items=3),
        ev.StepStarted(t=9.0, step=2, positions=(4, 3)),
        committed(10.0, 2, (4, 3), tokens=70, variance=4.0),
        ev.Loaded(t=10.0, instance=0, version=2, io_s=0.5),
        ev.Published(t=10.0, version=2, step=2, items=4),
        ev.Usage(t=10.0, busy_s=(6.0,), steps=(50,), prefill_tokens=(100,), decode_tokens=(150,)),
        ev.Evaluated(t=10.0, step=2, label="end", mean=0.75, tasks=8),
        ev.RunEnded(t=10.0, reason="done"),
    ]
    return rows


def submitted(t: float, position: int, domain: str, difficulty: float) -> ev.Submitted:
    return ev.Submitted(t=t, position=position, domain=domain, difficulty=difficulty, members=2)


def member(t: float, position: int, number: int, reward: float | None) -> ev.MemberDone:
    return ev.MemberDone(t=t, position=position, member=number, reward=reward, turns=1, tokens=5, tool_wait_s=0.0)


def committed(t: float, step: int, positions: tuple[int, ...], *, tokens: int, variance: float | None) -> ev.Committed:
    metrics = {"update_variance": variance}
    return ev.Committed(
        t=t, step=step, positions=positions, train_s=1.0, data_s=0.25, io_s=0.25, tokens=tokens, metrics=metrics
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("world", "live"),
        ("wall_s", 10.0),
        ("items_submitted", 5),
        ("items_consumed", 4),
        ("samples_consumed", 1 + 2 + 2 + 2),  # one member of item 0 died; of 3 and 4 nothing is known
        ("steps", 2),
        ("versions", 2),
        ("throughput_tokens_per_s", 35.0),
        ("throughput_parts", {"prefill": 10.0, "decode": 15.0, "trained": 10.0}),
        ("sampled_tokens_per_s", 0.5),
        ("trained_tokens_per_s", 10.0),
        ("forwarded_tokens_per_s", None),  # no step says
        ("items_per_s", 0.4),
        ("parts", {"rollout": 6.0, "training": 2.0, "data": 0.5, "io": 1.5}),
        ("engine_idle_fraction", 0.4),
        ("trainer_idle_fraction", 0.7),
        ("ttft_s", {"p50": 0.5, "p90": 0.5, "p99": 0.5}),
        ("tpot_s", {"p50": 0.25, "p90": 0.25, "p99": 0.25}),
        ("lag_items_max", 3),
        ("lag_items_mean", 1.5),
        ("lag_items_bound", 4),
        ("lag_steps_max", 1),
        ("lag_versions", {"mean": 0.0, "max": 0.0}),  # a request of item 0 alone is known
        ("lag_steps_bound", 2),
        ("overtakes_max", 1),
        ("update_variance", 3.0),
        ("reward_gain", 0.25),
        ("sample_efficiency", 0.25 / 7),
        ("reward_gain_per_s", 0.025),
        ("yield_J", 35.0 * 0.25 / 7),
        ("law_violations", []),
        ("plateau_distance", None),
    ],
)
def test_every_figure_of_a_story_computed_by_hand(key: str, value: object) -> None:
    got = summarise(story(), RULED)[key]
    if isinstance(value, float):
        assert got == pytest.approx(value)
    elif isinstance(value, dict):
        assert got == {k: pytest.approx(v) for k, v in value.items()}
    else:
        assert got == value


def test_reward_curve_deaths_and_reasons_of_nulls() -> None:
    summary = summarise(story(), RULED)
    assert summary["reward"]["curve"] == [[7.0, 1, 0.5], [10.0, 2, 0.75]]
    assert summary["dead"]["timeout"] == 1
    assert sum(summary["dead"].values()) == 1
    assert summary["death_share_by_length_quartile"] == {"q1": 0.0, "q2": 0.5, "q3": None, "q4": 0.0}
    assert summary["held_out"] == [{"t": 10.0, "step": 2, "label": "end", "mean": 0.75, "tasks": 8}]
    assert "fewer than 8 steps" in summary["null_reasons"]["plateau_distance"]


def nulls(summary: Json) -> set[str]:
    inner = {f"{k}.{p}" for k, v in summary.items() if isinstance(v, dict) for p, x in v.items() if x is None}
    return {k for k, v in summary.items() if v is None} | inner


def test_forwarded_tokens_are_the_trainers_own_count() -> None:
    rows = [replace(e, metrics={"forward_tokens": 30.0}) if isinstance(e, ev.Committed) else e for e in story()]
    assert summarise(rows, RULED)["forwarded_tokens_per_s"] == pytest.approx(60.0 / 10.0)
    assert "not every step" in summarise(story(), RULED)["null_reasons"]["forwarded_tokens_per_s"]


def test_a_simulated_story_has_the_same_keys_and_no_learning() -> None:
    simulated = [
        ev.RunStarted(t=0.0, schema=1, world="sim", scenario="tiny", seed=1) if isinstance(e, ev.RunStarted) else e
        for e in story()
        if not isinstance(e, ev.Usage)
    ]
    summary = summarise(simulated, RULED)
    assert list(summary) == list(summarise(story(), RULED))
    assert summary["yield_J"] is None
    assert "models time, not learning" in summary["null_reasons"]["yield_J"]
    assert "usage" in summary["null_reasons"]["throughput_tokens_per_s"]
    assert nulls(summary) <= set(summary["null_reasons"])


def test_an_empty_trace_is_all_nulls_with_reasons() -> None:
    summary = summarise([], RULED)
    assert nulls(summary) <= set(summary["null_reasons"])
    json.dumps(summary, allow_nan=False)


# --- laws ------


def replaced(index_of: type[ev.Event], nth: int, **over: Any) -> list[ev.Event]:
    """The story with one event changed."""
    rows = story()
    at = [i for i, e in enumerate(rows) if isinstance(e, index_of)][nth]
    rows[at] = replace(rows[at], **over)
    return rows


@pytest.mark.parametrize(
    ("events", "says"),
    [
        (replaced(ev.Taken, 1, lag_items=0), "item 2 has lag 1, the trace says 0"),
        (replaced(ev.Taken, 0, position=2), "item 2 became taken, but it is running"),
        (replaced(ev.Submitted, 4, position=9), "submitted 9, but 4 is next"),
        (replaced(ev.StepStarted, 0, positions=(0, 1)), "step 1 trains [0, 1], taken were [0, 2]"),
        (replaced(ev.Committed, 1, step=3), "step 3 after step 1"),
        (replaced(ev.Published, 0, items=3), "published 3 items, 2 are committed"),
        (replaced(ev.Loaded, 0, version=0), "published 1, but 0 is still served"),
        (replaced(ev.Dead, 0, position=0), "item 0 became dead, but it is taken"),
        (replaced(ev.Finished, 1, t=3.5), "time went back"),
        ([e for e in story() if not isinstance(e, ev.Published)], "4 committed items never published"),
        ([*story()[:-1], submitted(10.0, 5, "agent", 1.0), ev.RunEnded(t=10.0, reason="done")], "neither trained nor"),
    ],
)
def test_a_broken_law_is_reported_not_hidden(events: list[ev.Event], says: str) -> None:
    found = summarise(events, RULED)["law_violations"]
    assert any(says in line for line in found), found


def test_window_admission_lag_and_concurrency_are_checked_without_the_queue() -> None:
    laws = LawCheck(QueueShape(n=3, batch=1, window=1), concurrency=2, instances=1)
    for position in range(4):
        laws.apply(submitted(0.0, position, "agent", 1.0))
    laws.apply(ev.Finished(t=1.0, position=1, tokens=1, reward=0.0))
    laws.apply(ev.Taken(t=1.0, position=1, lag_items=0))
    told = "\n".join(laws.violations)
    assert "head + N reached" in told
    assert "published + dead + N = 3" in told
    assert "3 items run at once" in told
    assert "took 1 outside the window [0, 0]" in told
    assert "overtook 1 others, more than 0" in told


def test_lag_above_the_bound_is_named() -> None:
    laws = LawCheck(QueueShape(n=2, batch=1, window=1), concurrency=99, instances=1)
    for position in range(4):
        laws.apply(submitted(0.0, position, "agent", 1.0))
    for position in range(4):
        laws.apply(ev.Finished(t=1.0, position=position, tokens=1, reward=0.0))
        laws.apply(ev.Taken(t=1.0, position=position, lag_items=position))
        laws.apply(ev.StepStarted(t=1.0, step=position + 1, positions=(position,)))
        laws.apply(committed(1.0, position + 1, (position,), tokens=1, variance=None))
    assert any("item 3 has lag 3 items, above the bound 1" in line for line in laws.violations)
    assert any("item 3 has lag 3 steps, above the bound 1" in line for line in laws.violations)


def parked(laws: LawCheck, *positions: int) -> list[str]:
    for position in positions:
        laws.apply(ev.Parked(t=2.0, position=position))
    return laws.violations


def six_running() -> LawCheck:
    laws = LawCheck(QueueShape(n=6, batch=2, window=2, park_items=2, park_reach=2), concurrency=6, instances=1)
    for position in range(6):
        laws.apply(submitted(0.0, position, "agent", 1.0))
    return laws


def test_the_escapes_laws_are_checked_without_the_queue() -> None:
    assert "parked 1, which is not the head 0" in parked(six_running(), 1)[0]
    assert "parked 2 beside 2 others, at most 2 may be" in parked(six_running(), 0, 1, 2)[0]
    laws = six_running()
    assert parked(laws, 0) == []
    laws.apply(ev.Dead(t=3.0, position=0, reason="stale", tokens=0))
    assert "item 0 died stale, 1 behind the head" in laws.violations[0]
    laws = six_running()
    laws.apply(ev.Finished(t=1.0, position=0, tokens=1, reward=0.0))
    assert "parked 0, which is finished" in parked(laws, 0)[0]


def test_an_item_left_too_far_behind_must_die_before_anything_else_happens() -> None:
    laws = six_running()
    assert parked(laws, 0) == []
    for position in (1, 2):
        laws.apply(ev.Finished(t=2.0, position=position, tokens=1, reward=0.0))
        laws.apply(ev.Taken(t=2.0, position=position, lag_items=position - 1))
    assert laws.violations == []
    laws.apply(ev.StepStarted(t=2.0, step=1, positions=(1, 2)))
    assert laws.violations == ["t=2.000: started step 1 while [0] should have died stale"]
    laws.apply(ev.Dead(t=2.0, position=0, reason="stale", tokens=0))
    assert len(laws.violations) == 1


def test_a_parked_item_may_lag_by_its_reach_and_no_more() -> None:
    for reach, broken in ((3, False), (1, True)):
        laws = LawCheck(QueueShape(n=3, batch=1, window=1, park_items=1, park_reach=reach), concurrency=9, instances=1)
        for position in range(5):
            laws.apply(submitted(0.0, position, "agent", 1.0))
        laws.apply(ev.Parked(t=1.0, position=0))
        for lag, position in enumerate((1, 2, 3, 4, 0)):
            laws.apply(ev.Finished(t=1.0, position=position, tokens=1, reward=0.0))
            laws.apply(ev.Taken(t=1.0, position=position, lag_items=lag))
        assert any("item 0 has lag 4 items, above the bound 3" in line for line in laws.violations) is broken


# --- several lives ------


def test_lives_add_up_and_what_was_not_durable_is_gone() -> None:
    usage = {"steps": (1,), "prefill_tokens": (10,), "decode_tokens": (10,)}
    queue = {
        "states": ["committed", "committed", "finished"],
        "served": [0, 0, 0],
        "committed": [0, 1],
        "published": 0,
        "finished_order": [2],
        "forming": [],
        "training": [],
    }
    rows: list[ev.Event] = [ev.RunStarted(t=0.0, schema=1, world="live", scenario="tiny", seed=1)]
    rows += [submitted(0.0, p, "agent", 1.0) for p in range(4)]  # the pool never heard of the last
    for p in range(3):
        rows += [ev.Finished(t=1.0, position=p, tokens=4, reward=0.5)]
    rows += [ev.Taken(t=1.0, position=0, lag_items=0), ev.Taken(t=1.0, position=1, lag_items=1)]
    rows += [ev.StepStarted(t=1.0, step=1, positions=(0, 1)), committed(2.0, 1, (0, 1), tokens=8, variance=None)]
    rows += [ev.Taken(t=2.0, position=2, lag_items=2), ev.Usage(t=3.0, busy_s=(2.0,), **usage)]
    items = {"2": ("agent", 0.0, 1.0)}
    rows += [ev.Resumed(t=5.0, life=1, queue=queue, items=items, step=1, version=0, published_step=0)]
    rows += [ev.RolledBack(t=5.0, positions=(2,)), ev.Usage(t=6.0, busy_s=(1.0,), **usage)]
    summary = summarise(rows, RULED)
    assert (summary["items_submitted"], summary["items_consumed"], summary["lives"]) == (3, 2, 2)
    assert summary["parts"]["rollout"] == 3.0
    assert summary["throughput_parts"]["decode"] == pytest.approx(20 / 6)
    assert summary["lag_items_max"] == 1, "the take that was rolled back trained nothing"
    assert summary["law_violations"] == []
    assert summary["ended"] == "killed"


def test_a_life_after_an_orderly_stop_that_is_killed_was_killed() -> None:
    queue = {key: [] for key in ("states", "served", "committed", "finished_order", "forming", "training")}
    rows: list[ev.Event] = [ev.RunStarted(t=0.0, schema=1, world="live", scenario="tiny", seed=1)]
    rows += [ev.RunEnded(t=1.0, reason="stopped")]
    assert summarise(rows, RULED)["ended"] == "stopped"
    resumed = ev.Resumed(t=1.0, life=1, queue={**queue, "published": 0}, items={}, step=0, version=0, published_step=0)
    assert summarise([*rows, resumed], RULED)["ended"] == "killed"


def test_engine_work_before_the_first_item_is_not_the_runs() -> None:
    usage = {"steps": (9,), "prefill_tokens": (1000,), "decode_tokens": (1000,)}
    run = fold([story()[0], ev.Usage(t=0.0, busy_s=(50.0,), **usage), *story()[1:3]])
    again = ev.Usage(t=1.0, busy_s=(50.5,), steps=(10,), prefill_tokens=(1001,), decode_tokens=(1002,))
    run.apply(again)
    assert (run.busy_s, run.engine_steps, run.prefill_tokens, run.decode_tokens) == (0.5, 1, 1, 2)


def test_the_cached_share_is_measured_or_null_with_a_reason() -> None:
    usage = {"busy_s": (1.0,), "steps": (1,), "prefill_tokens": (30,), "decode_tokens": (9,)}
    told = summarise([*story()[:3], ev.Usage(t=2.0, **usage)], RULED)
    assert told["cached_share"] is None
    assert "count no cached tokens" in told["null_reasons"]["cached_share"]
    more = [ev.Usage(t=2.0, cached_tokens=(70,), **usage), ev.Usage(t=3.0, cached_tokens=(70,), **usage)]
    assert summarise([*story()[:3], *more], RULED)["cached_share"] == 0.7


# --- estimators ------


def test_spread_ratio_of_sorted_work_is_large_and_of_a_dealt_order_small() -> None:
    values = np.arange(64, dtype=np.float64)
    dealt = values.reshape(8, 8).T.reshape(-1)
    sizes = [8] * 8
    ordered = stats.spread_ratio(values, sizes)
    assert ordered is not None
    assert ordered > 2.5
    assert (stats.spread_ratio(dealt, sizes) or 1.0) < 0.5


@settings(max_examples=30)
@given(st.integers(0, 10_000))
def test_spread_ratio_of_chance_is_about_one(seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=400)
    ratio = stats.spread_ratio(values, [4] * 100)
    assert ratio is not None
    assert 0.75 < ratio < 1.25


@settings(max_examples=40)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=40), st.floats(0.5, 3), st.floats(-9, 9))
def test_spread_ratio_has_no_unit(values: list[float], scale: float, shift: float) -> None:
    array = np.round(np.array(values), 3)
    sizes = [1] * len(array)
    one, other = stats.spread_ratio(array, sizes), stats.spread_ratio(array * scale + shift, sizes)
    assert (one is None) == (other is None) or np.ptp(array) < 1e-6
    if one is not None and other is not None:
        assert one == pytest.approx(other, rel=1e-6)


def test_mean_shift_by_hand() -> None:
    values = np.array([0.0, 0.0, 4.0, 4.0])
    assert stats.mean_shift(values, 2) == pytest.approx(-1.0)
    assert stats.mean_shift(values, 4) is None
    shares = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert stats.mean_shift(shares, 2) == pytest.approx(0.5)


def test_plateau_distance_knows_fallen_rising_and_arrived() -> None:
    assert stats.plateau_distance([0.5] * 40) == 0.0
    rising = stats.plateau_distance([i / 40 for i in range(40)])
    fallen = stats.plateau_distance([0.2] * 15 + [0.8] * 15 + [0.3] * 10)
    assert rising == pytest.approx(10 / 40)
    assert fallen == pytest.approx(0.5)
    assert stats.plateau_distance([0.1] * 7) is None


def test_quartiles_and_ends() -> None:
    assert stats.share_by_quartile([1, 2, 3, 4], [False, False, True, True]) == [0.0, 0.0, 1.0, 1.0]
    assert stats.share_by_quartile([], []) == [None] * 4
    assert stats.ends_mean([float(i) for i in range(20)]) == (0.5, 18.5, 2)
    assert stats.smooth([0.0, 2.0, 4.0], 2) == [0.0, 1.0, 3.0]


def test_paired_interval_against_the_normal_formula() -> None:
    rng = np.random.default_rng(5)
    start = {str(i): float(rng.random() < 0.3) for i in range(400)}
    end = {task: min(1.0, score + float(rng.random() < 0.3)) for task, score in start.items()}
    got = paired_interval(start, end)
    differences = np.array([end[t] - start[t] for t in start])
    half = 1.96 * differences.std() / math.sqrt(400)
    assert got.mean == pytest.approx(differences.mean())
    assert got.low == pytest.approx(differences.mean() - half, abs=0.005)
    assert got.high == pytest.approx(differences.mean() + half, abs=0.005)
    assert got == paired_interval(start, end), "seeded"


def test_intervals_refuse_what_would_flatter() -> None:
    with pytest.raises(ForgeError, match="same tasks"):
        paired_interval({"a": 0.0, "b": 0.0}, {"a": 1.0})
    with pytest.raises(ForgeError, match="no tasks"):
        paired_interval({}, {})
    one = mean_interval([2.0])
    assert not one.is_bounded
    assert one.to_dict() == {"mean": 2.0, "low": None, "high": None, "n": 1}
    three = mean_interval([1.0, 2.0, 3.0])
    assert three.high == pytest.approx(2 + 4.303 / math.sqrt(3))
    assert three.overlaps(mean_interval([5.0, 5.1])) is True
    assert three.overlaps(mean_interval([50.0, 50.1])) is False
    assert three.overlaps(one), "one observation rules nothing out"


# --- random worlds ------


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["windowed_fifo", "strict_fifo", "greedy", "fffo"]),
    k=st.integers(1, 2),
    crashes=st.lists(st.floats(0.5, 12), max_size=3),
)
def test_no_world_breaks_a_law_and_every_item_is_counted_once(
    seed: int, kind: str, k: int, crashes: list[float]
) -> None:
    given_scenario = scenario(policy={"scheduler": {"kind": kind}, "sync": {"k": k}}, seed=seed)
    events = trace_of(given_scenario, seed=seed, mtbf_s=8.0, crashes=tuple(sorted(crashes)))
    summary = summarise(events, given_scenario)
    assert summary["law_violations"] == []
    assert summary["items_consumed"] + sum(summary["dead"].values()) == summary["items_submitted"] == 60
    assert nulls(summary) <= set(summary["null_reasons"])
    bound = summary["lag_items_bound"]
    assert bound is None or summary["lag_items_max"] <= bound
    assert 0 <= summary["trainer_idle_fraction"] <= 1
    assert json.dumps(summary) == json.dumps(summarise([ev.decode(ev.encode(e)) for e in events], given_scenario))
