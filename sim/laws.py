"""Quantities as functions of a standard normal, so that what is drawn together can have variance in common."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from forge.sections_agents import Spread

Array = NDArray[np.float64]

_NORMAL = NormalDist()
_HALF = math.sqrt(0.5)


class Law:
    """A `Spread` as a function that rises with z: log-normal up to its quantile 1 - tail_share, Pareto from there."""

    __slots__ = ("_cap", "_exponent", "_median", "_scale", "_sigma", "_tail_z")

    def __init__(self, spread: Spread) -> None:
        self._median, self._sigma, self._cap = spread.median, spread.sigma, spread.cap
        self._tail_z = -threshold(spread.tail_share)
        self._exponent = -1.0 / spread.tail_index
        begin = spread.median * math.exp(spread.sigma * self._tail_z) if spread.tail_share else 0.0
        self._scale = begin * spread.tail_share**-self._exponent

    def __call__(self, z: Array) -> Array:
        """Of the shape of `z`."""
        values = np.exp(self._sigma * z)
        values *= self._median
        tail = z > self._tail_z
        if tail.any():
            # normal_cdf(-z), since 1 - normal_cdf(z) has no digits left far out
            values[tail] = [self._scale * normal_cdf(-high) ** self._exponent for high in z[tail].tolist()]
        return np.minimum(values, self._cap, out=values)

    def whole(self, z: Array) -> NDArray[np.int64]:
        """Rounded, at least 1."""
        return np.maximum(np.rint(self(z)), 1.0).astype(np.int64)


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z * _HALF)


def threshold(probability: float) -> float:
    """The z that a standard normal lies below with this probability."""
    if probability <= 0.0:
        return -math.inf
    return math.inf if probability >= 1.0 else _NORMAL.inv_cdf(probability)
