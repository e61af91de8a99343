"""The search space as written: every key of a policy or of the fleet's shape, and errors that name key and way out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_scenarios import build

from forge.scenario import Scenario, load, parse, resolved
from forge.types import ForgeError
from sim.candidates import at, candidate
from sim.space import Choices, Space, Span
from sim.space_text import from_params, from_table, space_of

SCENARIO = build({"n": 16, "batch": 4, "concurrency": 8, "group": 2})
FRACTION, KIND, CREDIT = "policy.scheduler.fraction", "policy.router.kind", "policy.router.credit"


def params(*written: str, scenario: Scenario = SCENARIO) -> Space:
    return space_of(from_params(written), scenario)


@given(st.floats(0.001, 0.5), st.floats(0.001, 0.499), st.sampled_from(["", " log"]))
def test_a_range_reads_back(low: float, width: float, how: str) -> None:
    (span,) = params(f"{FRACTION}={low!r}..{low + width!r}{how}").dimensions
    assert span == Span(FRACTION, low, low + width, log=how == " log")
    assert params(f"{FRACTION}={span}").dimensions[0].path == FRACTION


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=6, unique=True))
def test_choices_read_back_from_the_command_line_and_from_toml(values: list[int]) -> None:
    path = "engine.instances"
    wanted = (Choices(path, tuple(values)),)
    assert params(f"{path}={','.join(map(str, values))}").dimensions == wanted
    assert space_of(from_table({"engine": {"instances": values}}, "x"), SCENARIO).dimensions == wanted


@given(st.text(max_size=20))
def test_any_text_is_a_space_or_a_users_error(text: str) -> None:
    for path in (FRACTION, "engine.instances", KIND):
        with suppress(ForgeError):
            params(f"{path}={text}")


@given(st.text(max_size=30))
def test_any_key_is_known_or_a_users_error(path: str) -> None:
    with pytest.raises(ForgeError):
        params(f"{path}=1,2")


@given(st.integers(0, 2**31))
def test_a_point_that_the_sampler_asks_for_is_a_scenario_with_those_values(seed: int) -> None:
    space = params(
        f"{KIND}=least_loaded,dynamo,sglang", f"{CREDIT}=0..1", "policy.router.match=0.1,0.9", f"{FRACTION}=0.1..0.9",
        "queue.n=8..24 step 4", "engine.instances=1,2",
    )  # fmt: skip
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    point = space.suggest(study.ask())
    there = resolved(at(SCENARIO, point))
    for path, value in point:
        held: Any = there
        for part in path.split("."):
            held = held[part]
        assert held == value
    values = dict(point)
    assert (CREDIT in values) == (values[KIND] == "dynamo")
    assert ("policy.router.match" in values) == (values[KIND] == "sglang")
    assert values["queue.n"] in (8, 12, 16, 20, 24)
    assert there["queue"]["concurrency"] <= there["queue"]["n"]


def test_listing_leaves_out_keys_of_other_kinds() -> None:
    space = params(f"{KIND}=least_loaded,dynamo", "policy.router.block=16,32", "engine.instances=1,2")
    points = list(space.every() or ())
    assert len(points) == len(set(points)) == 2 * (1 + 2)
    assert params(f"{FRACTION}=0.1..0.9").every() is None
    assert len(list(params(f"{FRACTION}=0.1..0.9 step 0.2").every() or ())) == 5


def test_the_own_point_changes_nothing() -> None:
    space = params(f"{KIND}=least_loaded,dynamo", "policy.router.block=16,32", "engine.instances=2,4", "queue.n=8,24")
    own = space.own(SCENARIO)
    assert dict(own) == {KIND: "least_loaded", "engine.instances": 1, "queue.n": 16}
    assert at(SCENARIO, own) == SCENARIO


@pytest.mark.parametrize(
    ("param", "complaint"),
    [
        ("policy.scheduler.fractoin=0.1..0.9", "policy.scheduler.fractoin: unknown key; check its spelling"),
        ("policy.schedular.fraction=0.1..0.9", "not a key that can be tuned; those are policy.scheduler.*"),
        ("policy.router.credit=0..1", "least_loaded has no such key; add policy.router.kind=dynamo to the space"),
        ("policy.router.kind=least_loaded,magic", "'magic': must be 'round_robin'"),
        ("policy.scheduler.fraction=0..1", "0: must lie in (0, 1]"),
        ("policy.scheduler.fraction=0.9..0.1", "lower end comes first"),
        ("policy.scheduler.fraction=0.1..0.9 step 3", "the step must be above 0"),
        ("policy.scheduler.fraction=0.5", "not a range of numbers, nor choices; give a range such as"),
        ("policy.sync.mode=in_flight..drain", "not a range of numbers"),
        ("policy.sync.mode=in_flight,now", "'now': must be 'in_flight', 'drain' or 'abort'"),
        ("engine.instances=2,two", "'two': must be a valid integer"),
        ("engine.instances=0..4", "0: must be greater than or equal to 1"),
        ("engine.instances=2,2", "a choice is given twice"),
        ("engine.temperature=0.5,1", "of [engine] those are instances, slots"),
        ("queue.group=2,4", "of [queue] those are n, concurrency"),
        ("sim.deployment.tp=1,2", "the scenario has no [sim.deployment]; add it"),
        ("train.lr=1e-5,1e-4", "train.lr: not a key that can be tuned"),
        ("engine.instances", "--param engine.instances: write key.path=values"),
    ],
)
def test_errors_name_the_key_and_the_way_out(param: str, complaint: str) -> None:
    with pytest.raises(ForgeError) as raised:
        params(param)
    assert complaint in str(raised.value)
    assert param.partition("=")[0] in str(raised.value)


def test_a_scenarios_own_space_is_read_and_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'name = "x"\nstop = {items = 8}\ndomains = [{name = "agent"}]\n[tune]\npolicy.scheduler.fraction = "0.1..0.9"\n'
        "engine.instances = [1, 2]\n"
    )
    scenario = load(path)
    assert parse(resolved(scenario), "again") == scenario
    space = space_of(from_table(scenario.tune, "tune"), scenario)
    assert [one.path for one in space.dimensions] == [FRACTION, "engine.instances"]
    with pytest.raises(ForgeError, match=r"tune: engine\.slotz: not a key"):
        space_of(from_table({"engine": {"slotz": [1, 2]}}, "tune"), scenario)


def test_a_tuned_n_is_a_number_where_the_scenarios_follows_from_its_budget() -> None:
    queue = {"batch": 4, "concurrency": 8, "group": 2, "lag_budget": 20, "n_from_lag_budget": True}
    scenario = build(queue)
    assert scenario.queue.n == 17
    assert at(scenario, (("queue.n", 12),)).queue.n == 12
    assert at(scenario, ((FRACTION, 0.1),)).queue.n == 20


def test_no_point_over_the_lag_budget_and_none_that_deadlocks_is_a_candidate() -> None:
    scenario = build({"n": 16, "batch": 4, "concurrency": 8, "group": 2, "lag_budget": 20})
    with pytest.raises(ForgeError, match=r"queue\.lag_budget = 20"):
        candidate(scenario, ((FRACTION, 0.9),))
    with pytest.raises(ForgeError, match=r"queue\.lag_budget = 20: fffo has no window"):
        candidate(scenario, (("policy.scheduler.kind", "fffo"),))
    with pytest.raises(ForgeError, match="deadlock"):
        candidate(scenario, (("queue.n", 2),))
    assert candidate(scenario, ((FRACTION, 0.3),)).lag_bound == 18
