"""The search: the same points and figures whatever happens to the process, nothing simulated twice, budgets kept."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from sim_scenarios import heavy_tail

from forge.scenario import Scenario, load, policy_toml
from forge.sections import Efficiency
from forge.types import ForgeError
from sim.candidates import Candidate
from sim.certainty import importances
from sim.choose import LAG, SPEED, UNREST, WAIT, Budgets, Judged, choose, costs, hopeless, judge
from sim.measure import KEYS, Figures
from sim.search import FIRST, Search
from sim.space import Space
from sim.space_text import from_params, space_of
from sim.study import Study
from sim.sweep import Result, Task
from sim.tune import Tuned, tune
from sim.tune_files import tables, write
from sim.validate import validate

QUIET = Console(file=io.StringIO())
SEEDS = (0, 1, 2)
SCENARIO = heavy_tail(items=30, n=16, concurrency=8, lag_budget=26)


class Fake:
    """Runs without a simulation: a wider window is faster and less calm. Counts them; dies after `lives` tasks."""

    def __init__(self, lives: int = 10**6) -> None:
        self.lives = lives
        self.made: list[tuple[Candidate, int]] = []

    def __call__(self, tasks: Sequence[Task]) -> Iterator[Result]:
        for _, seed, those in tasks:
            self.lives -= 1
            if self.lives < 0:
                raise KeyboardInterrupt
            self.made += [(one, seed) for one in those]
            yield seed, {one: fake(one, seed) for one in those}


def fake(one: Candidate, seed: int) -> Figures:
    window = one.window or one.n
    rest = dict.fromkeys(KEYS, 1.0)
    speed, unrest = 100.0 + seed + 3.0 * window, 0.7 + 0.06 * window + 0.01 * seed
    return rest | {SPEED: speed, UNREST: unrest, LAG: float(one.lag_bound or 0), WAIT: 0.1 * one.concurrency}


def space(*params: str, scenario: Scenario = SCENARIO) -> Space:
    return space_of(from_params(params), scenario)


def quiet(done: int, total: int) -> None:
    """Tells nobody."""


WIDE = space("policy.scheduler.fraction=0.05..1", "queue.n=8..30", "queue.concurrency=4..16")


def searched(over: Space, path: Path | None, run: Callable[[Sequence[Task]], Iterator[Result]], trials: int) -> Search:
    with closing(Study(SCENARIO, over, SEEDS, path)) as study:
        search = Search(SCENARIO, over, SEEDS, study, run, Budgets(lag_items=26))
        search.go(trials, quiet)
    return search


# --- laws ------


def test_the_search_is_a_function_of_scenario_space_seeds_and_trials() -> None:
    one, other = (searched(WIDE, None, Fake(), 20) for _ in range(2))
    assert one.tried == other.tried
    assert one.refused == other.refused
    assert len(one.tried) == 21  # and the scenario's own


def test_no_candidate_that_is_run_exceeds_the_lag_budget() -> None:
    run = Fake()
    search = searched(WIDE, None, run, 20)
    assert all(one.lag_bound is not None and one.lag_bound <= 26 for one, _ in run.made)
    assert search.illegal, "the space has points over the budget"
    assert all("lag_budget" in why or "concurrency" in why for why in search.illegal.values())


def test_nothing_is_run_twice_and_the_hopeless_not_on_all_seeds() -> None:
    run = Fake()
    search = searched(WIDE, None, run, 20)
    assert len(run.made) == len(set(run.made))
    by_candidate = {one: [seed for other, seed in run.made if other == one] for one in search.tried}
    assert all(len(seeds) == (FIRST if one in search.refused else len(SEEDS)) for one, seeds in by_candidate.items())
    assert search.refused
    assert search.own not in search.refused


@given(st.integers(0, 24))
@settings(max_examples=4)
def test_interrupted_anywhere_it_goes_on_to_the_same_result(
    tmp_path_factory: pytest.TempPathFactory, lives: int
) -> None:
    path = tmp_path_factory.mktemp("tune") / "tune.journal"
    whole, first, second = Fake(), Fake(lives), Fake()
    wanted = searched(WIDE, None, whole, 14)
    with suppress(KeyboardInterrupt):
        searched(WIDE, path, first, 14)
    found = searched(WIDE, path, second, 14)
    assert (found.tried, found.refused) == (wanted.tried, wanted.refused)
    assert sorted(first.made + second.made, key=repr) == sorted(whole.made, key=repr)


def test_more_trials_go_on_from_fewer(tmp_path: Path) -> None:
    few, more = Fake(), Fake()
    before = searched(WIDE, tmp_path / "tune.journal", few, 6)
    after = searched(WIDE, tmp_path / "tune.journal", more, 12)
    assert after.tried[: len(before.tried)] == before.tried
    assert not set(few.made) & set(more.made)


def test_a_file_that_is_no_study_is_a_users_error(tmp_path: Path) -> None:
    path = tmp_path / "tune.journal"
    path.write_text("something else\n" * 100)
    with pytest.raises(ForgeError, match=r"tune\.journal: not a study of tuning"):
        Study(SCENARIO, WIDE, SEEDS, path)


def test_two_at_a_time_are_refused(tmp_path: Path) -> None:
    with (
        closing(Study(SCENARIO, WIDE, SEEDS, tmp_path / "tune.journal")),
        pytest.raises(ForgeError, match="another forge tune is at work there"),
    ):
        Study(SCENARIO, WIDE, SEEDS, tmp_path / "tune.journal")


# --- judging ------


def candidates(count: int) -> list[Candidate]:
    return [Candidate(32, 8, w, 30 + w, 1 + w % 2, (("queue.n", w),)) for w in range(1, count + 1)]


@st.composite
def swept(draw: st.DrawFn) -> dict[Candidate, tuple[Figures, ...]]:
    few = st.sampled_from([1.0, 2.0, 3.0])
    rest = dict.fromkeys(KEYS, 1.0)
    runs = lambda: tuple(rest | {key: draw(few) for key in (SPEED, LAG, UNREST, WAIT)} for _ in range(2))  # noqa: E731
    return {one: runs() for one in candidates(draw(st.integers(1, 8)))}


@given(swept())
def test_the_front_is_what_nothing_beats(runs: dict[Candidate, tuple[Figures, ...]]) -> None:
    def beats(one: Judged, other: Judged) -> bool:
        pairs = list(zip(costs(one), costs(other), strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    judged = judge(runs, 4, Budgets(), Efficiency())
    assert any(j.pareto for j in judged)
    for j in judged:
        assert j.pareto != any(beats(other, j) for other in judged)


@given(swept())
def test_what_is_dropped_is_over_the_budget_or_beaten_on_every_seed(runs: dict[Candidate, tuple[Figures, ...]]) -> None:
    own = next(iter(runs))
    for one in runs:
        why = hopeless(one, runs, own, 2.0)
        if "slower" in why:
            assert any(all(a[SPEED] > b[SPEED] for a, b in zip(runs[o], runs[one], strict=True)) for o in runs)
        elif why:
            assert all(figures[UNREST] > 2.0 for figures in runs[one])


def test_the_own_policy_may_be_chosen_where_it_is_not_shown_to_exceed_the_budget() -> None:
    own, calm = candidates(9)[8], candidates(3)[2]
    rest = dict.fromkeys(KEYS, 1.0)
    near = tuple(rest | {UNREST: u, SPEED: 200.0} for u in (0.9, 1.2, 1.0))
    far = tuple(rest | {UNREST: u, SPEED: 200.0} for u in (1.9, 2.2, 2.0))
    slow = tuple(rest | {UNREST: 0.5, SPEED: 100.0} for _ in range(3))
    for mine, chosen in ((near, own), (far, calm)):
        found = choose(judge({own: mine, calm: slow}, 4, Budgets(), Efficiency(), own=own))
        assert found.chosen.candidate == chosen


def judged(one: Candidate, speeds: Sequence[float], reason: str | None = None) -> Judged:
    runs = tuple(dict.fromkeys(KEYS, 1.0) | {SPEED: speed} for speed in speeds)
    return Judged(one, runs, {}, None, reason)


@pytest.mark.parametrize(
    ("gains", "reason", "adopt", "verdict"),
    [
        ((5.0, 6.0, 7.0), None, True, "beats the scenario's own"),
        ((-5.0, -6.0, -7.0), None, False, "slower than the scenario's own"),
        ((-5.0, 6.0, 1.0), None, False, "The defaults are as good"),
        ((-5.0, -6.0, -7.0), "lag of up to 99 items", True, "out of bounds (lag of up to 99 items)"),
    ],
)
def test_held_out_seeds_decide(gains: tuple[float, ...], reason: str | None, adopt: bool, verdict: str) -> None:
    chosen, own = judged(candidates(4)[0], ()), judged(candidates(4)[2], (), reason)
    base = tuple(dict.fromkeys(KEYS, 1.0) | {SPEED: 100.0 * seed} for seed in (1, 2, 3))
    runs = tuple(figures | {SPEED: figures[SPEED] + gain} for figures, gain in zip(base, gains, strict=True))
    found = validate(SEEDS, chosen, own, runs, base)
    assert found.adopt is adopt
    assert verdict in found.verdict
    assert found.gains[SPEED].mean == pytest.approx(sum(gains) / 3)


def test_importance_is_whole_for_the_only_key_that_matters() -> None:
    both = [Candidate(8, 8, 1, 7, 1, (("a", a), ("b", b))) for a in (1, 2, 3) for b in (1, 2, 3)]
    runs = {one: tuple(dict.fromkeys(KEYS, 1.0) | {SPEED: 10.0 * dict(one.point)["a"]} for _ in SEEDS) for one in both}
    weights = importances(judge(runs, 4, Budgets(), Efficiency()))[SPEED]
    assert weights == {"a": pytest.approx(1.0), "b": 0.0}


# --- the whole ------


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    over = space("engine.instances=1,2", "policy.scheduler.kind=windowed_fifo,strict_fifo")
    return tune(SCENARIO, space=over, seeds=range(4), workers=1, console=QUIET)


def test_a_tuned_fleet_deploys_with_its_policy(tuned: Tuned, tmp_path: Path) -> None:
    policy, table, report, *_ = write(tuned, tmp_path / "policy.toml", "forge tune test")
    source = tmp_path / "scenario.toml"
    source.write_text('name = "x"\nstop = {items = 8}\ndomains = [{name = "agent"}]\nengine = {slots = 9}\n')
    deployed = load(source, policy=policy)
    point = dict(tuned.adopted.candidate.point)
    assert deployed.engine.instances == point["engine.instances"]
    assert deployed.engine.slots == 9
    assert deployed.policy.scheduler.kind == point["policy.scheduler.kind"]
    held = json.loads(table.read_text())
    assert set(held["held_out"]["seeds"]).isdisjoint(held["seeds"])
    assert "fewest devices" in held["objective"]
    assert held["held_out"]["verdict"] in report.read_text()
    policy.write_text(policy_toml(deployed.policy, {"engine": {"instances": "many"}}))
    with pytest.raises(ForgeError, match=r"policy\.toml: engine\.instances = 'many'"):
        load(source, policy=policy)
    assert tables(tuned)["engine"] == {"instances": point["engine.instances"]}


def test_ray_that_is_not_there_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ForgeError, match=r"--ray: needs ray, here and on the nodes: pip install 'forge-rl\[ray\]'"):
        tune(SCENARIO, seeds=range(4), ray="local", console=QUIET)


KILLED = """
from contextlib import closing, suppress
from pathlib import Path
from test_tune_search import QUIET, SLOW, tune, space
tune(SLOW, space=space("policy.scheduler.fraction=0.1..0.9", scenario=SLOW), seeds=range(4), trials=2,
     workers=1, store=Path(r"{store}"), console=QUIET)
"""
SLOW = heavy_tail(items=60, n=16, concurrency=8)


def test_killed_it_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "tune.journal"
    child = subprocess.Popen([sys.executable, "-c", KILLED.format(store=store)], cwd=Path(__file__).parent)
    try:
        while not _kept(store) and child.poll() is None:
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    with store.open("a") as journal:
        journal.write('{"op_code": 3, "half a li')
    over = space("policy.scheduler.fraction=0.1..0.9", scenario=SLOW)
    again = tune(SLOW, space=over, seeds=range(4), trials=2, workers=1, store=store, console=QUIET)
    afresh = tune(SLOW, space=over, seeds=range(4), trials=2, workers=1, console=QUIET)
    assert again.kept > 0
    assert (again.judged, again.validation) == (afresh.judged, afresh.validation)


def _kept(store: Path) -> bool:
    """Whether a run was kept."""
    return store.is_file() and SPEED in store.read_text()
