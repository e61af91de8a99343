"""Means with 95% confidence intervals over seeds (Student's t)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

#: two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom; beyond the table the normal's 1.96
#: is too small by less than 4%
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


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
        df = len(samples) - 1
        t = _T95[df - 1] if df <= len(_T95) else 1.96
        half = t * stdev(samples) / math.sqrt(len(samples))
        return cls(mean, mean - half, mean + half)

    def to_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "low": self.low, "high": self.high}
