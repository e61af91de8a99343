"""Calibrated on the first minute of a live run, scored on the rest of it: how far the simulator is off once it has
seen the machine at this work, and the policy begin to learn it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge import trace as ev
from forge.metrics.part import part_figures
from forge.scenario import Scenario
from forge.types import ForgeError
from sim.calibrate import calibrate
from sim.learnt import as_learnt, learns
from sim.measure import intervals
from sim.predict import with_seed
from sim.world import simulate

CUT_S = 60.0
SEEDS = range(5)
LEAST_REST = 1.0  # of the cut: a shorter rest says little


def recalibrate(
    events: Sequence[ev.Event], scenario: Scenario, *, cut_s: float = CUT_S, seeds: Sequence[int] = SEEDS
) -> dict[str, Any] | None:
    """`prediction.json`'s keys for the time from `cut_s` to the scenario's stop, and `measured`, the run's own figures.

    Both worlds are read by the same rule over the same span: simulated runs begin at 0 too, so that they are as full
    at the cut as the run was. Where rewards rise before the cut, the rest's lengths are taken to be those of the
    members that passed (`sim.learnt`). None where the run has several lives, no stop in seconds, too short a rest, or
    nothing to calibrate on before the cut.
    """
    end_s = min(scenario.stop.seconds or 0.0, events[-1].t if events else 0.0)
    if end_s < cut_s * (1.0 + LEAST_REST) or any(isinstance(e, ev.Resumed) for e in events):
        return None
    try:
        seen = [e for e in events if e.t <= cut_s]
        fitted = calibrate(seen, scenario, source=f"the first {cut_s:.0f} s of this run")
        if learns(seen):
            fitted = as_learnt(fitted, seen, scenario)
    except ForgeError:
        return None
    instances = scenario.engine.instances
    known = scenario.model_copy(update={"sim": fitted.sim})
    runs = [part_figures(simulate(with_seed(known, seed)).events, cut_s, end_s, instances) for seed in seeds]
    return {
        "cut_s": cut_s,
        "end_s": end_s,
        "seeds": list(seeds),
        "calibrated_from": fitted.sim.calibrated_from,
        "figures": {key: interval.to_dict() for key, interval in intervals(runs).items()},
        "measured": part_figures(events, cut_s, end_s, instances),
    }
