"""The estimators behind the figures. Pure functions of arrays; every random choice has a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHUFFLES = 100

PLATEAU = (
    "moving mean of step rewards over 10% of the steps (5 at least); the larger of its best value minus its last, "
    "and its change over the last quarter of the steps: near zero only where it neither fell nor still moves"
)
PLATEAU_STEPS = 8


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90 and p99, linearly interpolated; None without values."""
    if not values:
        return None
    p50, p90, p99 = np.percentile(np.asarray(values, dtype=np.float64), [50, 90, 99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def spread_ratio(values: Array, sizes: Sequence[int]) -> float | None:
    """Standard deviation of batch means over its mean under random order; 1 is what chance gives.

    `values` is one row an item in the order consumed (columns: a vector-valued feature, whose variances add up),
    `sizes` the batch sizes. None with fewer than two batches, or where the feature does not vary.
    """
    rows = values.reshape(len(values), -1)
    if len(sizes) < 2 or np.all(rows == rows[0]):
        return None
    rng = np.random.default_rng(0)
    chance: list[float] = []
    while len(chance) < SHUFFLES:  # as many at once as a few megabytes hold
        count = min(SHUFFLES - len(chance), max(1, 200_000 // len(rows)))
        orders = rng.permuted(np.tile(np.arange(len(rows)), (count, 1)), axis=1)
        chance += _spreads(rows[orders], sizes).tolist()
    expected = float(np.mean(chance))
    return float(_spreads(rows[None], sizes)[0]) / expected if expected > 0 else None


def _spreads(orders: Array, sizes: Sequence[int]) -> Array:
    """Per order (axis 0) of rows (axis 1): standard deviation of batch means, over all columns."""
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    means = np.add.reduceat(orders, starts, axis=1) / np.asarray(sizes, dtype=np.float64)[None, :, None]
    spreads: Array = np.sqrt(means.var(axis=1).sum(axis=1))
    return spreads


def mean_shift(values: Array, first: int) -> float | None:
    """Mean of the first `first` rows minus the mean of all, in standard deviations of all.

    Of a vector-valued feature (shares that sum to one): half the summed absolute differences, in [0, 1]. None where
    `first` rows are all there is, or where nothing varies.
    """
    if len(values) <= first:
        return None
    difference = values[:first].mean(axis=0) - values.mean(axis=0)
    if values.ndim == 2:
        return float(np.abs(difference).sum() / 2)
    deviation = float(values.std())
    return float(difference) / deviation if deviation > 0 else None


def share_by_quartile(sizes: Sequence[float], lost: Sequence[bool]) -> list[float | None]:
    """Share lost in each quartile of size, smallest first; None for an empty quartile (many equal sizes)."""
    if not sizes:
        return [None] * 4
    values = np.asarray(sizes, dtype=np.float64)
    quartile = np.searchsorted(np.quantile(values, [0.25, 0.5, 0.75]), values, side="left")
    gone = np.asarray(lost, dtype=np.float64)
    return [float(gone[quartile == q].mean()) if np.any(quartile == q) else None for q in range(4)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Moving mean over the last `window` values (fewer at the start), so that it knows no future."""
    total = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    return [float(m) for m in (total[ends] - total[starts]) / (ends - starts)]


def smoothing_window(steps: int) -> int:
    """10% of the steps, 5 at least."""
    return max(5, steps // 10)


def plateau_distance(rewards: Sequence[float]) -> float | None:
    """Distance of the smoothed reward from its plateau as `PLATEAU` defines it; None below 8 steps."""
    if len(rewards) < PLATEAU_STEPS:
        return None
    window = smoothing_window(len(rewards))
    curve = smooth(rewards, window)[window - 1 :]
    quarter = min(len(curve) - 1, len(rewards) // 4)
    return max(max(curve) - curve[-1], abs(curve[-1] - curve[-1 - quarter]))


def ends_mean(values: Sequence[float]) -> tuple[float, float, int] | None:
    """Mean of the first and of the last 10% of values (one at least), and how many that is."""
    if not values:
        return None
    count = max(1, len(values) // 10)
    first, last = np.mean(values[:count]), np.mean(values[-count:])
    return float(first), float(last), count
