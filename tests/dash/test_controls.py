"""Controls come from the registry, what they change is a scenario or a sentence, what is downloaded deploys."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.controls import (
    SLOTS,
    applied,
    changed,
    fields_controls,
    fleet_controls,
    kind_control,
    policy_file,
    queue_controls,
    slots_for,
    value_of,
)
from forge.scenario import Scenario, load, policy_toml
from forge.types import ForgeError
from sim.tunable import fields_of, kinds_of

QUICKSTART = load("quickstart")
CAMPAIGN = load("campaign_m25")

KINDS = [(slot, kind) for slot in SLOTS for kind in kinds_of(slot)]


@pytest.mark.parametrize(("slot", "kind"), KINDS)
def test_every_policy_has_its_fields(slot: str, kind: str) -> None:
    """So a new one shows up by itself, and its defaults are a policy."""
    found = fields_controls(slot, kind)
    assert tuple(one.name for one in found) == fields_of(kinds_of(slot)[kind])
    assert kind in kind_control(slot).choices
    assert f"**{kind}**: " in kind_control(slot).help
    changes = {f"policy.{slot}.kind": kind, **{one.path: one.default for one in found}}
    made = applied(QUICKSTART, changes, "page")
    assert getattr(made.policy, slot).kind == kind


@pytest.mark.parametrize("scenario", [QUICKSTART, CAMPAIGN], ids=lambda s: s.name)
def test_untouched_controls_change_nothing(scenario: Scenario) -> None:
    everything = [*queue_controls(), *fleet_controls(scenario)]
    for slot in SLOTS:
        kind = kind_control(slot)
        everything += [kind, *fields_controls(slot, str(value_of(scenario, kind)))]
    values = {one.path: value_of(scenario, one) for one in everything}
    assert changed(scenario, values, everything) == {}
    assert applied(scenario, changed(scenario, values, everything), "page") == scenario


def test_accelerators_have_controls_only_where_there_are_some() -> None:
    paths = {one.path for one in fleet_controls(QUICKSTART)}
    assert not any(path.startswith("sim.deployment") for path in paths)
    assert "sim.deployment.prefill.instances" in {one.path for one in fleet_controls(CAMPAIGN)}
    assert "placement" not in slots_for(QUICKSTART)
    assert {"placement", "speculation", "kv"} <= set(slots_for(CAMPAIGN))


def test_a_size_takes_a_table_in_and_out() -> None:
    sizes = {"sim.deployment.prefill.instances": 4, "sim.tiers.l2_gib": 100.0, "sim.speculation.acceptance": 0.7}
    made = applied(CAMPAIGN, sizes, "page")
    assert made.sim.deployment is not None
    assert made.sim.deployment.prefill is not None
    assert made.sim.deployment.prefill.instances == 4
    assert made.sim.tiers is not None
    assert made.sim.speculation is not None
    assert applied(made, dict.fromkeys(sizes, 0), "page") == CAMPAIGN


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"queue.n": 4}, "concurrency = 24 must not exceed n = 4"),
        ({"policy.scheduler.fraction": 1.5}, "page: policy.scheduler.fraction = 1.5: must lie in (0, 1]"),
        ({"engine.instances": 0}, "page: engine.instances = 0: must be greater than or equal to 1"),
        ({"policy.sync.k": 9}, "page: queue would deadlock"),
        ({"policy.scheduler.fraction": None}, "policy.scheduler.fraction"),
    ],
)
def test_impossible_numbers_are_one_sentence(changes: dict[str, float | None], complaint: str) -> None:
    with pytest.raises(ForgeError) as raised:
        applied(QUICKSTART, changes, "page")
    assert complaint in str(raised.value)
    assert "\n" not in str(raised.value)


def test_over_the_lag_budget_nothing_is_made() -> None:
    budgeted = applied(QUICKSTART, {"queue.lag_budget": 40}, "page")
    with pytest.raises(ForgeError, match=r"queue\.lag_budget = 40"):
        applied(budgeted, {"policy.scheduler.kind": "greedy"}, "page")


@given(
    kind=st.sampled_from([kind for slot, kind in KINDS if slot == "scheduler"]),
    router=st.sampled_from([kind for slot, kind in KINDS if slot == "router"]),
    n=st.integers(24, 64),
    instances=st.integers(1, 8),
)
def test_what_is_downloaded_is_what_was_simulated(
    tmp_path_factory: pytest.TempPathFactory, kind: str, router: str, n: int, instances: int
) -> None:
    """`forge run quickstart --policy FILE` loads the very scenario of the page."""
    changes = {
        "policy.scheduler.kind": kind,
        "policy.router.kind": router,
        "queue.n": n,
        "engine.instances": instances,
    }
    made = applied(QUICKSTART, changes, "page")
    path = tmp_path_factory.mktemp("policy") / "policy.toml"
    path.write_text(policy_file(made, changes, "made by a page"), encoding="utf-8")
    assert load("quickstart", policy=path) == made


def test_tiers_that_go_are_sizes_of_zero() -> None:
    tiered = applied(CAMPAIGN, {"sim.tiers.l2_gib": 100.0}, "page")
    gone = {"sim.tiers.l2_gib": 0.0}
    text = policy_file(applied(tiered, gone, "page"), gone, "")
    assert "l2_gib = 0" in text
    prefill = applied(CAMPAIGN, {"sim.deployment.prefill.instances": 2}, "page")
    none = {"sim.deployment.prefill.instances": 0}
    with pytest.raises(ForgeError, match=r"\[sim.deployment.prefill\]: a policy file cannot take it away"):
        policy_file(applied(prefill, none, "page"), none, "")


def test_nothing_changed_is_the_scenarios_own_policy() -> None:
    queue = {"queue": {"n": 32, "concurrency": 24}}
    assert policy_file(QUICKSTART, {}, "as it is") == policy_toml(QUICKSTART.policy, queue, "as it is")


def test_a_prefill_pool_begins_with_the_parallelism_of_the_others(tmp_path: Path) -> None:
    everything = fleet_controls(CAMPAIGN)
    values = {one.path: value_of(CAMPAIGN, one) for one in everything}
    changes = changed(CAMPAIGN, values | {"sim.deployment.prefill.instances": 4}, everything)
    made = applied(CAMPAIGN, changes, "page")
    assert made.sim.deployment is not None
    pool = made.sim.deployment.prefill
    assert pool is not None
    assert (pool.instances, pool.tp, pool.ep) == (4, 8, 8)
    path = tmp_path / "policy.toml"
    path.write_text(policy_file(made, changes, ""), encoding="utf-8")
    assert load("campaign_m25", policy=path) == made
