"""Intervals: how far a difference of held-out scores, or a mean over seeds, can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forge.types import ForgeError

RESAMPLES = 10_000

#: two-sided 95% quantiles of Student's t for 1, 2, ... degrees of freedom
# fmt: off
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on


def t95(samples: int) -> float:
    """Student's t for a two-sided 95% interval of a mean of `samples` >= 2 values.

    Beyond the table the normal's quantile and the first term of its expansion in 1/df.
    """
    return _T95[samples - 2] if samples - 2 < len(_T95) else 1.96 + 2.5 / (samples - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95% bounds over `n` observations. One observation has no spread: its bounds are infinite."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, which knows no infinity: null instead."""
        bounds = (self.low, self.high) if self.is_bounded else (None, None)
        return {"mean": self.mean, "low": bounds[0], "high": bounds[1], "n": self.n}


def paired_interval(
    start: Mapping[str, float], end: Mapping[str, float], *, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Mean of end minus start over tasks, with bounds from a seeded bootstrap over tasks (percentile method).

    Both map the same task ids to scores. Raises ForgeError where they do not: dropping tasks would flatter.
    """
    if set(start) != set(end):
        odd = sorted(set(start) ^ set(end))
        raise ForgeError(f"evaluation: start and end must score the same tasks; {len(odd)} differ, e.g. {odd[0]!r}")
    if not start:
        raise ForgeError("evaluation: no tasks")
    differences = np.array([end[task] - start[task] for task in sorted(start)], dtype=np.float64)
    n = len(differences)
    rng = np.random.default_rng(seed)
    chunks = [min(1000, resamples - done) for done in range(0, resamples, 1000)]  # bounds memory
    means = np.concatenate([differences[rng.integers(0, n, (rows, n))].mean(axis=1) for rows in chunks])
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(mean=float(differences.mean()), low=float(low), high=float(high), n=n)


def gain_interval(first: Sequence[float], last: Sequence[float]) -> Interval:
    """Mean of `last` minus mean of `first`, as many values each, with Student's t bounds (pooled variance).

    One value on each side has no spread: the bounds are infinite.
    """
    n = len(first)
    before, after = math.fsum(first) / n, math.fsum(last) / n
    gain = after - before
    if n < 2:
        return Interval(mean=gain, low=-math.inf, high=math.inf, n=n)
    squares = math.fsum((v - before) ** 2 for v in first) + math.fsum((v - after) ** 2 for v in last)
    half = t95(2 * n - 1) * math.sqrt(squares / (2 * n - 2) * 2 / n)
    return Interval(mean=gain, low=gain - half, high=gain + half, n=n)


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean over independent runs (one at least) with Student's t bounds."""
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return Interval(mean=mean, low=-math.inf, high=math.inf, n=n)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = t95(n) * math.sqrt(variance / n)
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n)
