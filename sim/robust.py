"""Robust least squares with priors: soft-L1 on the data, squares on the parameters' distance from their prior."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
MOST_STEPS, ENOUGH = 60, 1e-5  # how many, and the relative decrease of the cost at which it ends
MOST_DAMPING = 1e6


def robust_fit(
    residuals: Callable[[Array], Array], jacobian: Callable[[Array], Array], sigma: Array, enough: float = ENOUGH
) -> Array:
    """The betas that minimise `sum 2 (sqrt(1 + r^2) - 1) + sum (beta / sigma)^2`, from 0.

    `residuals` [n] in units of their noise, `jacobian` [n, len(sigma)]. Levenberg-Marquardt on reweighted residuals:
    every step lowers the cost, and no step depends on anything but the arguments.
    """
    betas, damping, precision = np.zeros(len(sigma)), 1e-2, np.diag(1.0 / sigma**2)
    r = residuals(betas)
    cost = _cost(r, betas, precision)
    for _ in range(MOST_STEPS):
        slopes, before = jacobian(betas), cost
        weighted = slopes.T / np.sqrt(1.0 + r**2)
        curvature, gradient = weighted @ slopes + precision, weighted @ r + precision @ betas
        while damping < MOST_DAMPING:
            ahead = betas - np.linalg.solve(curvature + damping * precision, gradient)
            tried = residuals(ahead)
            lower = _cost(tried, ahead, precision)
            if lower < cost:
                betas, r, cost, damping = ahead, tried, lower, damping / 10.0
                break
            damping *= 10.0
        if before - cost < enough * before:
            break
    return betas


def slopes_by_difference(residuals: Callable[[Array], Array], step: float) -> Callable[[Array], Array]:
    """A jacobian by forward differences, where nothing better is known."""

    def jacobian(betas: Array) -> Array:
        here = residuals(betas)
        return np.stack([(residuals(betas + one) - here) / step for one in np.eye(len(betas)) * step], axis=1)

    return jacobian


def _cost(residuals: Array, betas: Array, precision: Array) -> float:
    """Twice the negative log posterior; infinite where a model left its domain."""
    cost = float(2.0 * (np.sqrt(1.0 + residuals**2) - 1.0).sum() + betas @ precision @ betas)
    return cost if np.isfinite(cost) else np.inf
