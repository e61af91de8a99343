"""Fit of the serving model to measured points: logs of TTFT and TPOT jointly, soft-L1, effects shrunk toward 1.

Every parameter of the cost and serving model is, at a cell, a product of factors: a common value, and effects of what
the cell runs on (backend, version, model, ...). Logs make that linear: `log p_j = sum_k X_jk beta_k`, each beta with a
prior `N(0, sigma^2)`: the common one around a textbook value, effects around 1. An effect that the training cells
say nothing about stays at 1, which is what a deployment of a new version gets.

The Jacobian needs one evaluation a parameter, not one a beta, for a cell's residual depends on its own parameters only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from forge.cost import CostModel, Efficiencies
from sim.accuracy_data import Cell
from sim.robust import robust_fit
from sim.serving import Points, Serving, ttft_tpot

Array = NDArray[np.float64]

#: Noise of a log residual: beyond it the loss turns linear, and priors are weighed against it.
NOISE = 0.1
STEP = 1e-4  # of the forward difference, in logs


@dataclass(frozen=True)
class Prior:
    """Of one parameter: textbook value, sigma of the log of the common factor, and of effects by scope."""

    value: float
    sigma: float
    effects: tuple[tuple[str, float], ...] = ()


def _prior(value: float, sigma: float, **effects: float) -> Prior:
    return Prior(value, sigma, tuple(effects.items()))


PRIORS = {
    "flops": _prior(0.6, 0.3, backend=0.2, model=0.15),
    "bandwidth": _prior(0.75, 0.2, backend=0.15, model=0.1),
    "expert_flops": _prior(0.4, 0.5, backend=0.3, quantisation=0.2),
    "expert_bandwidth": _prior(0.6, 0.4, backend=0.2, quantisation=0.2),
    "attention_flops": _prior(0.4, 0.5, backend=0.2),
    "attention_bandwidth": _prior(0.6, 0.4, backend=0.3),
    "link": _prior(0.5, 0.5, backend=0.2),
    "activation": _prior(10.0, 0.7),
    "spread": _prior(0.9, 0.1),
    "step_s": _prior(1e-3, 0.7, backend=0.5),
    "layer_s": _prior(4e-5, 0.7, backend=0.4, generation=0.3, version=0.2, family=0.2),
    "expert_layer_s": _prior(4e-5, 0.7, backend=0.4, generation=0.3, quantisation=0.4),
    "latent_layer_s": _prior(3e-5, 0.7, backend=0.3),
    "launch_s": _prior(3e-4, 0.7, backend=0.5, family=0.5),
    "row_s": _prior(1e-5, 0.7, backend=0.5),
    "row_layer_s": _prior(2e-7, 0.7, backend=0.5),
    "collective_s": _prior(1e-5, 0.7, backend=0.4),
    "decode": _prior(1.0, 0.0, model=0.05, family=0.3),
    "prefill": _prior(1.0, 0.0, model=0.1, family=0.25, harness=0.15),
    "request_s": _prior(0.05, 0.7, backend=0.5, version=0.4, harness=0.3),
    "burst": _prior(0.05, 0.7, harness=0.5, version=0.7),
    "convoy": _prior(1.0, 0.7, harness=0.7, version=0.5),
    "queue": _prior(0.5, 0.7, backend=0.5),
    "waits": _prior(1.0, 0.7),
    "chunk": _prior(8192.0, 0.5, backend=0.5),
    "interference": _prior(1.0, 0.1, backend=0.2),
}
SERVING = ("decode", "prefill", "request_s", "burst", "convoy", "queue", "waits", "chunk", "interference")


def levels(cell: Cell) -> dict[str, str]:
    """What a cell runs on, by the scopes that effects are given for."""
    key, model = cell.key, cell.on.model.name
    return {
        "backend": key.backend,
        "version": f"{key.backend} {key.version}",
        "harness": cell.harness,
        "generation": f"{key.backend} {generation(key.backend, key.version)}",
        "model": model,
        "family": f"{model} on {key.backend}",
        "quantisation": f"{key.gemm} {key.moe}",
    }


def generation(backend: str, version: str) -> str:
    """Releases that share an engine loop: vLLM's changed with 0.17; others by their major number."""
    parts = version.split(".")
    if not parts[0].isdigit() or len(parts) < 2 or not parts[1].isdigit():
        return "?"
    if backend == "vllm":
        return "0.17 or newer" if (int(parts[0]), int(parts[1])) >= (0, 17) else "before 0.17"
    return parts[0]


@dataclass(frozen=True)
class Design:
    """Columns of the linear map from betas to logs of parameters: for each the parameter, scope and level."""

    columns: tuple[tuple[str, str, str], ...]
    sigma: Array

    @cached_property
    def parameter(self) -> Array:
        """[columns, parameters] of 0 and 1: which one a column belongs to."""
        return np.array([[name == own for own in PRIORS] for name, _, _ in self.columns], float)

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Design:
        seen = [levels(cell) for cell in cells]
        columns, sigma = [], []
        for name, prior in PRIORS.items():
            if prior.sigma:
                columns.append((name, "", ""))
                sigma.append(prior.sigma)
            for scope, width in prior.effects:
                for level in sorted({one[scope] for one in seen}):
                    columns.append((name, scope, level))
                    sigma.append(width)
        return cls(tuple(columns), np.array(sigma))

    def rows(self, cells: Sequence[Cell]) -> Array:
        """[n, columns] of 0 and 1."""
        seen = [levels(cell) for cell in cells]
        return np.array([[not scope or one[scope] == level for _, scope, level in self.columns] for one in seen], float)


@dataclass(frozen=True)
class Fitted:
    """Betas of a design. `parameters` and `predict` answer for cells of any deployment, known or not."""

    design: Design
    betas: Array

    def parameters(self, cells: Sequence[Cell]) -> dict[str, Array]:
        """[n] each."""
        return _parameters(self.design, self.design.rows(cells), self.betas)

    def predict(self, cells: Sequence[Cell]) -> tuple[Array, Array]:
        """TTFT and TPOT, seconds, [n] each."""
        points = Points.of([(c.on, c.concurrency, c.isl, c.osl) for c in cells])
        return _evaluate(points, self.parameters(cells))

    def cost_model(self, cell: Cell) -> CostModel:
        """For a simulator of the cell's deployment, which has its own queue and pacing."""
        at = {name: float(value[0]) for name, value in self.parameters([cell]).items()}
        by = Efficiencies(**{name: value for name, value in at.items() if name not in SERVING})
        return CostModel(cell.on, by, decode_factor=at["decode"], prefill_factor=at["prefill"])


def fit(cells: Sequence[Cell]) -> Fitted:
    """The most likely betas. Starts from the priors, so that it depends on nothing but `cells`."""
    design = Design.of(cells)
    problem = _Problem(cells, design)
    return Fitted(design, robust_fit(problem.residuals, problem.jacobian, design.sigma))


class _Problem:
    """Log residuals in units of NOISE, TTFT [n] before TPOT [n]."""

    def __init__(self, cells: Sequence[Cell], design: Design) -> None:
        self.points = Points.of([(c.on, c.concurrency, c.isl, c.osl) for c in cells])
        self.design = design
        self.x = design.rows(cells)
        self.measured = np.log([[c.ttft_s for c in cells], [c.tpot_s for c in cells]])

    def residuals(self, betas: Array) -> Array:
        return self._residuals(_parameters(self.design, self.x, betas))

    def _residuals(self, parameters: dict[str, Array]) -> Array:
        """[2n]"""
        return ((np.log(np.stack(_evaluate(self.points, parameters))) - self.measured) / NOISE).ravel()

    def jacobian(self, betas: Array) -> Array:
        """[2n, columns]"""
        parameters = _parameters(self.design, self.x, betas)
        here = self._residuals(parameters)
        ahead = [self._residuals({**parameters, name: parameters[name] * math.exp(STEP)}) for name in PRIORS]
        slopes = (np.stack(ahead, axis=1) - here[:, None]) / STEP
        jacobian: Array = (slopes @ self.design.parameter.T) * np.concatenate([self.x, self.x])
        return jacobian


def _parameters(design: Design, x: Array, betas: Array) -> dict[str, Array]:
    logs = np.log([prior.value for prior in PRIORS.values()]) + (x * betas) @ design.parameter
    return dict(zip(PRIORS, np.exp(logs.T), strict=True))


def _evaluate(points: Points, parameters: dict[str, Array]) -> tuple[Array, Array]:
    by = Efficiencies(**{name: value for name, value in parameters.items() if name not in SERVING})
    return ttft_tpot(points, by, Serving(**{name: parameters[name] for name in SERVING}))
