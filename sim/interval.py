"""Means with 95% confidence intervals over seeds (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from forge.metrics.intervals import t95


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean and its 95% confidence interval. One sample has no spread: low = high = mean says nothing about it."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Interval:
        mean = fmean(samples)
        if len(samples) < 2:
            return cls(mean, mean, mean)
        half = t95(len(samples)) * stdev(samples) / math.sqrt(len(samples))
        return cls(mean, mean - half, mean + half)

    def to_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}
