"""Prediction beside measurement: `prediction.json`, and the table of both with the error.

    {"seeds": [0, 1, 2], "calibrated_from": "runs/...",
     "figures": {"throughput_tokens_per_s": {"mean": 812.0, "low": 780.1, "high": 843.9}, ...}}

as `sim.predict` writes it: means of simulated runs that differ in their seed, with 95% bounds of the mean. Keys are
those of `summary.json`, inner ones dotted (`ttft_s.p50`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from forge.types import ForgeError, Json

#: what is compared, with the unit shown; "share" is compared by difference, the others by ratio
COMPARED = {
    "throughput_tokens_per_s": ("Throughput (prefill + decode + trained)", "tokens/s"),
    "sampled_tokens_per_s": ("Sampled", "tokens/s"),
    "trained_tokens_per_s": ("Trained", "tokens/s"),
    "items_per_s": ("Items consumed", "1/s"),
    "steps": ("Trainer steps", ""),
    "lag_items_mean": ("Lag, mean", "items"),
    "lag_items_max": ("Lag, largest", "items"),
    "engine_idle_fraction": ("Engine idle", "share"),
    "trainer_idle_fraction": ("Trainer idle", "share"),
    "nonstationarity": ("Non-stationarity (1 is chance)", ""),
    "ttft_s.p50": ("Time to first token, median", "s"),
    "tpot_s.p50": ("Time per output token, median", "s"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row. `error`: predicted over measured minus 1, or for a share predicted minus measured; None: unknown.

    `low` and `high` hold 95% of single runs, which scatter more than means do; None with a single simulated seed.
    """

    key: str
    label: str
    unit: str
    predicted: float
    low: float | None
    high: float | None
    measured: float | None
    error: float | None

    @property
    def is_inside(self) -> bool | None:
        """Did the prediction's interval hold the measurement?"""
        if self.low is None or self.high is None or self.measured is None:
            return None
        return self.low <= self.measured <= self.high


def compare(prediction: Json, summary: Json) -> list[Compared]:
    """Rows in the order of `COMPARED`. Raises ForgeError where the prediction is of another format."""
    figures, seeds = prediction.get("figures"), prediction.get("seeds")
    if not isinstance(figures, dict) or not isinstance(seeds, list):
        raise ForgeError("prediction.json: needs `figures` and `seeds`; was it written by `sim.predict`?")
    rows = []
    for key, (label, unit) in COMPARED.items():
        if key not in figures:
            continue
        given, measured = figures[key], lookup(summary, key)
        # From bounds of the mean of n runs to bounds of one more run: t*s/sqrt(n) becomes t*s*sqrt(1 + 1/n).
        half = (given["high"] - given["mean"]) * math.sqrt(len(seeds) + 1)
        rows.append(
            Compared(
                key=key,
                label=label,
                unit=unit,
                predicted=given["mean"],
                low=given["mean"] - half if len(seeds) > 1 else None,
                high=given["mean"] + half if len(seeds) > 1 else None,
                measured=measured,
                error=_error(given["mean"], measured, unit),
            )
        )
    return rows


def lookup(summary: Json, key: str) -> float | None:
    """A figure by its dotted key; None where it is null or absent."""
    found: Any = summary
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if found is None else float(found)


def _error(predicted: float, measured: float | None, unit: str) -> float | None:
    if measured is None:
        return None
    if unit == "share":
        return predicted - measured
    return predicted / measured - 1 if measured else None
