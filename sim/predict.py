"""What a scenario will do, said before it is run: figures with intervals over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forge.scenario import Scenario
from sim.measure import intervals, measure
from sim.world import simulate


def predict(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    """Mean and 95% interval of every figure of `sim.measure`, over simulated runs that differ in their seed alone."""
    runs = [measure(simulate(with_seed(scenario, seed)).events, scenario) for seed in seeds]
    return {
        "seeds": list(seeds),
        "calibrated_from": scenario.sim.calibrated_from,
        "figures": {key: interval.to_dict() for key, interval in intervals(runs).items()},
    }


def with_seed(scenario: Scenario, seed: int) -> Scenario:
    return scenario.model_copy(update={"seed": seed})
