"""Tuning: the sweep keeps the lag budget, the choice keeps its stated rules, the files say how it was made."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from sim_scenarios import heavy_tail

from forge.scenario import Scenario, load
from forge.sections import Efficiency
from forge.types import ForgeError
from sim.candidates import Candidate, candidate, default_space
from sim.choose import Budgets, Choice, Judged, choose, judge
from sim.measure import KEYS, Figures
from sim.predict import predict
from sim.space import Space
from sim.tune import Tuned, tune
from sim.tune_files import write

QUIET = Console(file=io.StringIO())
SEEDS = (0, 1, 2, 3)


def small(scenario: Scenario) -> Space:
    return default_space(scenario, fractions=(0.3, 1.0), ns=(16,), concurrencies=(8,))


def swept(scenario: Scenario) -> list[Candidate]:
    return [candidate(scenario, point) for point in default_space(scenario).points or ()]


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    scenario = heavy_tail(items=30, lag_budget=24, n=16, concurrency=8)
    return tune(scenario, space=small(scenario), seeds=SEEDS, workers=1, console=QUIET)


@pytest.fixture(scope="module")
def written(tuned: Tuned, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write(tuned, tmp_path_factory.mktemp("tune") / "new" / "policy.toml", "forge tune x")


# --- candidates ------


def test_candidates_keep_the_lag_budget_and_validity() -> None:
    scenario = heavy_tail(n=24, concurrency=12, lag_budget=30)
    found = swept(scenario)
    assert all((c.lag_bound or 0) <= 30 and c.concurrency <= c.n and c.n >= 4 for c in found)
    assert len(set(found)) == len(found)
    assert max(c.n for c in found) == 31  # strict order: N + 1 - 2 = 30
    assert max(c.window or 0 for c in found) == 16  # greedy: 2N - 2 = 30
    for c in found:
        shape = c.of(scenario).shape()
        assert (shape.n, shape.window) == (c.n, c.window)
        assert (c.n, c.concurrency, 1) in {(s.n, s.concurrency, s.window) for s in found}


def test_without_a_lag_budget_n_is_fixed() -> None:
    found = swept(heavy_tail(n=24, concurrency=12))
    assert {c.n for c in found} == {24}
    assert {c.window for c in found} == {1, 2, 4, 7, 12, 18, 24}


def test_a_budget_that_leaves_nothing_is_a_users_error() -> None:
    with pytest.raises(ForgeError, match=r"queue\.lag_budget = 2: no N in reach"):
        default_space(heavy_tail(lag_budget=2))
    with pytest.raises(ForgeError, match="at least four"):
        tune(heavy_tail(), seeds=(1, 1, 2, 3), workers=1)


# --- judging ------

STRICT, HALF, FULL = (Candidate(8, 8, w, 8 + w - 2, 1, (("policy.scheduler.fraction", w / 8),)) for w in (1, 4, 8))


def figures(speed: float, nonstationarity: float, lag: float = 5.0) -> Figures:
    rest = dict.fromkeys(KEYS, 1.0)
    return rest | {"trained_tokens_per_s": speed, "nonstationarity": nonstationarity, "lag_items_mean": lag}


def too_short(speed: float) -> Figures:
    return {key: value for key, value in figures(speed, 0.0).items() if key != "nonstationarity"}


def judged(half: list[Figures], full: list[Figures], budget: float = 1.25) -> list[Judged]:
    strict = [figures(100.0, 1.0), figures(200.0, 1.0), figures(300.0, 1.0)]
    runs = {STRICT: tuple(strict), HALF: tuple(half), FULL: tuple(full)}
    return judge(runs, 4, Budgets(nonstationarity=budget), Efficiency())


def chosen(choice: Choice) -> Candidate:
    return choice.chosen.candidate


def test_the_fastest_within_the_budgets_is_chosen_although_bands_over_seeds_overlap() -> None:
    half = [figures(110.0, 1.1), figures(211.0, 1.1), figures(309.0, 1.1)]
    full = [figures(130.0, 1.6), figures(230.0, 1.6), figures(330.0, 1.6)]
    choice = choose(judged(half, full))
    assert chosen(choice) == HALF
    assert (choice.feasible, choice.tied) == (2, 1)
    assert chosen(choose(judged(half, full, budget=2.0))) == FULL


def test_the_budget_is_held_by_the_upper_bound_not_the_mean() -> None:
    half = [figures(110.0, 1.0), figures(210.0, 1.2), figures(310.0, 1.4)]
    assert chosen(choose(judged(half, half))) == STRICT


def test_strict_order_is_within_the_budget_by_right() -> None:
    far = [figures(500.0, 3.0)] * 3
    assert chosen(choose(judged(far, far, budget=0.5))) == STRICT


def test_a_candidate_too_short_to_be_judged_never_wins_and_says_why() -> None:
    far = [figures(5000.0, 0.0), too_short(5000.0), figures(5000.0, 0.0)]
    found = judged([figures(101.0, 1.0)] * 3, far)
    assert chosen(choose(found)) != FULL
    full = next(j for j in found if j.candidate == FULL)
    assert full.reason == "its runs are too short to have nonstationarity"
    assert (full.j, full.pareto, full.feasible) == (None, False, False)
    runs = {STRICT: tuple([too_short(1.0)] * 3)}
    with pytest.raises(ForgeError, match="stop: no candidate can be judged: its runs are too short"):
        choose(judge(runs, 4, Budgets(), Efficiency()))


def test_refusals_name_the_budget() -> None:
    runs = {HALF: tuple([figures(1.0, 1.5)] * 3)}
    told = [judge(runs, 4, b, Efficiency())[0].reason for b in (Budgets(lag_items=4), Budgets(nonstationarity=1.25))]
    assert told == [
        "lag of up to 10 items, above the budget of 4",
        "non-stationarity of up to 1.5, above the budget of 1.25",
    ]


def test_a_prediction_leaves_out_what_its_runs_are_too_short_for() -> None:
    said = predict(heavy_tail(items=4), range(2))["figures"]
    assert "nonstationarity" not in said
    assert "trained_tokens_per_s" in said


def test_ties_go_to_the_less_non_stationary_then_to_the_smaller_lag() -> None:
    half = [figures(120.0, 1.01), figures(200.0, 1.02), figures(310.0, 1.0)]
    full = [figures(110.0, 1.1), figures(220.0, 1.1), figures(300.0, 1.1)]
    choice = choose(judged(half, full))
    assert (choice.fastest.candidate, choice.tied, chosen(choice)) == (HALF, 3, STRICT)


def test_j_refuses_to_rank_where_intervals_overlap() -> None:
    close = [figures(101.0, 1.0), figures(201.0, 1.0), figures(301.0, 1.0)]
    assert choose(judged(close, close)).by_j is None
    far = [figures(5000.0, 1.0)] * 3
    best = choose(judged(close, far)).by_j
    assert best is not None
    assert best.candidate == FULL


def test_the_pareto_front() -> None:
    better, worse = [figures(250.0, 1.0)] * 3, [figures(150.0, 1.2)] * 3
    front = {j.candidate: j.pareto for j in judged(better, worse)}
    assert front == {STRICT: False, HALF: True, FULL: False}


# --- the whole ------


def test_the_files(written: list[Path]) -> None:
    policy, table, report, *pictures = written
    assert [one.name for one in pictures] == ["pareto.png", "importance.png", "sensitivity.png"]
    assert all(one.read_bytes().startswith(b"\x89PNG") for one in pictures)
    assert all(f"({one.name})" in report.read_text() for one in pictures)
    assert "Made by `forge tune x`" in report.read_text()
    text = policy.read_text()
    assert text.startswith("# Tuned in simulation on scenario 'test', seeds 0, 1: W = ")
    assert "Objective: most trained tokens/s" in text
    data = json.loads(table.read_text())
    assert {row["window"] for row in data["candidates"]} == {1, 4}  # greedy at N = 16 would lag 30 > 24
    assert data["chosen"] in data["candidates"]
    assert all(row["feasible"] == (row["infeasible_reason"] is None) for row in data["candidates"])


def test_the_policy_deploys(tuned: Tuned, written: list[Path], tmp_path: Path) -> None:
    source = tmp_path / "scenario.toml"
    source.write_text('name = "x"\nstop = {items = 8}\ndomains = [{name = "agent"}]\n')
    deployed = load(source, policy=written[0])
    adopted = tuned.adopted.candidate
    assert deployed.policy == tuned.scenario.policy
    assert (deployed.queue.n, deployed.queue.concurrency) == (adopted.n, adopted.concurrency)
    assert deployed.shape().window == adopted.window


def test_workers_change_nothing(tuned: Tuned) -> None:
    scenario = tuned.scenario
    again = tune(scenario, space=small(scenario), seeds=SEEDS, workers=2, console=QUIET)
    assert (again.judged, again.validation) == (tuned.judged, tuned.validation)
