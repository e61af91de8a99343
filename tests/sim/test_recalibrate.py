"""Part of a run in figures, and calibration on a run's beginning scored on the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from sim_scenarios import build

from forge import trace as ev
from forge.metrics import summarise
from forge.metrics.part import part_figures
from forge.report.prediction import compare
from forge.scenario import Scenario
from forge.sections import Stop
from sim.recalibrate import recalibrate
from sim.world import simulate

NOTHING: Any = dict.fromkeys(("busy_s", "steps", "prefill_tokens", "decode_tokens"), (0,))


def scenario() -> Scenario:
    queue = {"n": 32, "batch": 8, "concurrency": 24, "group": 4}
    made = build(queue, sim={"train_step_s": 0.3}, engine={"slots": 48})
    return made.model_copy(update={"stop": Stop(seconds=45.0)})


@pytest.fixture(scope="module")
def found(events: list[ev.Event]) -> dict[str, Any]:
    made = recalibrate(events, scenario(), cut_s=20.0, seeds=range(2))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def events() -> list[ev.Event]:
    return simulate(scenario()).events


def test_the_whole_run_is_a_part_of_itself(events: list[ev.Event]) -> None:
    """Figures of usage events count from the first of them, which in the simulator is that of the first step."""
    summary = summarise([ev.Usage(t=0.0, **NOTHING), *events], scenario())
    figures = part_figures([ev.Usage(t=0.0, **NOTHING), *events], 0.0, summary["wall_s"], 1)
    assert len(figures) == 7
    for key, value in figures.items():
        assert value == pytest.approx(summary[key], rel=1e-9), key


def test_parts_add_up(events: list[ev.Event]) -> None:
    """Rates of two halves average to the whole's."""
    first, second, whole = (part_figures(events, a, b, 1) for a, b in ((0, 20), (20, 40), (0, 40)))
    for key in whole.keys() - {"lag_items_mean", "lag_items_max"}:
        assert (first[key] + second[key]) / 2 == pytest.approx(whole[key], rel=1e-9), key
    assert whole["lag_items_max"] == max(first["lag_items_max"], second["lag_items_max"])
    assert first["items_per_s"] != second["items_per_s"]


def test_a_step_under_way_keeps_the_trainer_busy() -> None:
    started = ev.StepStarted(t=3.0, step=1, positions=(0,))
    committed = ev.Committed(t=7.0, step=1, positions=(0,), train_s=4.0, data_s=0.0, io_s=0.0, tokens=80)
    for start, end, idle in ((0, 10, 0.6), (4, 6, 0.0), (5, 9, 0.5), (0, 3, 1.0)):
        assert part_figures([started, committed], start, end, 1)["trainer_idle_fraction"] == pytest.approx(idle)
    assert part_figures([started], 0, 4, 1)["trainer_idle_fraction"] == pytest.approx(0.75)


def test_where_nothing_changes_the_first_part_foretells_the_rest(found: dict[str, Any]) -> None:
    errors = {row.key: row.error for row in compare(found, found["measured"])}
    assert {"throughput_tokens_per_s", "trained_tokens_per_s", "items_per_s"} <= errors.keys()
    for key, error in errors.items():
        assert error is not None
        assert abs(error) < (0.6 if key == "lag_items_max" else 0.12), key
    assert (found["cut_s"], found["end_s"]) == (20.0, 45.0)


def test_only_the_beginning_is_looked_at(events: list[ev.Event], found: dict[str, Any]) -> None:
    """A trainer that takes three times as long after the cut is not foreseen."""
    slower = [replace(e, train_s=3 * e.train_s) if isinstance(e, ev.Committed) and e.t > 20.0 else e for e in events]
    changed = recalibrate(slower, scenario(), cut_s=20.0, seeds=range(2))
    assert changed is not None
    assert changed["figures"] == found["figures"]


def test_runs_that_say_nothing_are_left_out(events: list[ev.Event]) -> None:
    short = recalibrate(events, scenario(), cut_s=40.0)
    assert short is None
    again = ev.Resumed(t=30.0, life=1, queue={}, items={}, step=0, version=0, published_step=0)
    assert recalibrate([*events, again], scenario(), cut_s=20.0) is None
    assert recalibrate(events, scenario().model_copy(update={"stop": Stop(items=40)}), cut_s=20.0) is None
    nothing = [e for e in events if e.t > 20.0 or isinstance(e, ev.RunStarted)]
    assert recalibrate(nothing, scenario(), cut_s=20.0) is None
