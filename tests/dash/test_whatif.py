"""What-if answers with the simulator's own figures, says what it cut, and gives up in a sentence."""

from __future__ import annotations

import pytest

from dashboards import comparison, table
from dashboards.controls import applied
from dashboards.frames import tiers
from dashboards.whatif import ITEMS, ask, shortened
from forge.metrics import summarise
from forge.scenario import Scenario, load
from forge.types import ForgeError
from sim.world import simulate

QUICKSTART = load("quickstart")


@pytest.fixture(scope="module")
def small() -> Scenario:
    return shortened(QUICKSTART, 40)[0]


def test_the_answer_is_the_simulators(small: Scenario) -> None:
    summary = summarise(simulate(small).events, small)
    assert ask(small).records.summary() == summary


def test_a_cut_is_said_and_no_cut_is_not() -> None:
    shorter, note = shortened(QUICKSTART, ITEMS)
    assert shorter.stop.items == ITEMS
    assert note == f"Simulated are the first {ITEMS} items; the scenario itself goes on to 300 seconds."
    assert shortened(shorter, ITEMS) == (shorter, "")
    campaign, note = shortened(load("campaign_m25"), ITEMS)
    assert campaign.stop.items == ITEMS
    assert "125,000 items" in note


def test_another_policy_changes_the_result(small: Scenario) -> None:
    strict = applied(small, {"policy.scheduler.kind": "strict_fifo"}, "page")
    a, b = ask(small).records.summary(), ask(strict).records.summary()
    assert a["lag_items_bound"] != b["lag_items_bound"]
    assert b["overtakes_max"] == 0 < a["overtakes_max"]


def test_what_takes_too_long_is_given_up(small: Scenario) -> None:
    with pytest.raises(ForgeError, match=r"given up after 0 s .*lower the number of items"):
        ask(small, longest_s=0.0)


def test_too_many_instances_are_refused_before_they_are_made(small: Scenario) -> None:
    with pytest.raises(ForgeError, match=r"engine\.instances = 1000000: a page simulates at most 4096"):
        ask(applied(small, {"engine.instances": 1_000_000}, "page"))


def test_hits_are_told_by_tier() -> None:
    """A host memory beside instances whose own is too small: what they evict is found again."""
    base = shortened(load("campaign_m25", ["sim.deployment.kv_tokens=400000"]), 8)[0]
    few = {"engine.instances": 2, "queue.concurrency": 8, "sim.tiers.l2_gib": 500.0}
    records = ask(applied(base, few, "page")).records
    shares = dict(zip(*(tiers(records).columns[key] for key in ("tier", "share")), strict=True))
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["host memory (L2)"] > 0.0
    assert shares["shared store (L3)"] == 0.0


def test_items_that_only_die_are_a_sentence() -> None:
    hopeless = QUICKSTART.model_copy(update={"queue": QUICKSTART.queue.model_copy(update={"item_timeout_s": 1e-3})})
    with pytest.raises(ForgeError, match="died in a row"):
        ask(hopeless)


# --- the table ------


def summary(**over: object) -> dict[str, object]:
    figures: dict[str, object] = {
        "j_tokens": {"low": 90.0, "high": 100.0},
        "trained_tokens_per_s": 100.0,
        "engine_idle_fraction": 0.5,
        "lag_items_mean": 4.0,
        "steps": 10,
        "ttft_s": {"p50": 1.0, "p99": 2.0},
    }
    return figures | over


def test_differences_are_told_with_who_is_better() -> None:
    other = summary(
        trained_tokens_per_s=110.0,
        engine_idle_fraction=0.4,
        lag_items_mean=5.0,
        steps=11,
        j_tokens={"low": 95, "high": 120},
    )
    rows = {row.label: row for row in comparison.rows(summary(), other)}
    assert (rows["Trained tokens (1/s)"].difference, rows["Trained tokens (1/s)"].better) == ("+10.0%", True)
    assert (rows["Engines idle"].difference, rows["Engines idle"].better) == ("-10.0 points", True)
    assert rows["Lag, mean (items)"].better is False
    assert rows["Trainer steps"].better is None
    assert rows["J, modelled (tokens/s)"].difference == "intervals overlap: no winner"
    assert rows["Time to first token, median (s)"].difference == "same"
    assert "Non-stationarity (1 is chance)" not in rows


def test_a_winner_by_j_needs_intervals_apart() -> None:
    row = comparison.rows(summary(), summary(j_tokens={"low": 101.0, "high": 120.0}))[0]
    assert (row.difference, row.better) == ("intervals apart", True)


def test_a_table_escapes_names() -> None:
    html = table.figures(comparison.rows(summary()), ["<script>"])
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
