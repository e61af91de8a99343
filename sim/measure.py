"""The figures of one simulated run that tuning, prediction and calibration compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge import trace as ev
from forge.metrics import summarise
from forge.metrics.intervals import Interval, mean_interval
from forge.scenario import Scenario
from forge.types import Json

Figures = dict[str, float]

#: Keys of `summary.json`, inner ones dotted, so that prediction and measurement stand side by side under one name.
KEYS = (
    "throughput_tokens_per_s",
    "trained_tokens_per_s",
    "items_per_s",
    "lag_items_max",
    "lag_items_mean",
    "engine_idle_fraction",
    "trainer_idle_fraction",
    "nonstationarity",
    "steps",
    "wall_s",
    "ttft_s.p99",
)


def measure(events: Sequence[ev.Event], scenario: Scenario) -> Figures:
    """The figures of a run, without those that it is too short to have."""
    summary = summarise(events, scenario)
    found = {key: _figure(summary, key) for key in KEYS}
    return {key: float(value) for key, value in found.items() if value is not None}


def _figure(summary: Json, key: str) -> Any:
    whole, _, part = key.partition(".")
    value = summary[whole]
    return value[part] if part and value is not None else value


def intervals(runs: Sequence[Mapping[str, float]]) -> dict[str, Interval]:
    """Figure by figure over the seeds; only figures that every run has."""
    return {key: mean_interval([run[key] for run in runs]) for key in runs[0] if all(key in run for run in runs)}
