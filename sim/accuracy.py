"""How far the cost and serving model is from measurement, on deployments it has not seen (`forge bench sim-accuracy`).

Cross-validation leaves out one whole deployment at a time; with a calibration folder the model is fitted there alone.
Errors are |predicted / measured - 1| a cell. A left-out deployment with a sibling (same model and backend) in training
is an easier case than one without: both are reported. Error bars are learnt from left-out errors too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from forge.cost import CostModel
from forge.types import ForgeError
from sim.accuracy_data import Cell, Key
from sim.serving_fit import Fitted, fit

Array = NDArray[np.float64]

#: Share of left-out cells that an error bar is to hold.
COVERAGE = 0.8
METRICS = ("ttft", "tpot")
#: Groups of cells that figures are given for.
SUBSETS: Mapping[str, Callable[[Cell], bool]] = {
    "minimax_m25": lambda cell: cell.on.model.name == "MiniMax-M2.5",
    "vllm": lambda cell: cell.key.backend == "vllm",
    "all": lambda _: True,
}

Progress = Callable[[int, int], None]
Bars = dict[tuple[str, bool], float]  # (metric, sibling) -> error bar, natural log


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds, and error bars: the measured value lies within a factor `1 + bar` either way for COVERAGE of the cells.
    `sibling`: a deployment of the same model and backend was in training."""

    cell: Cell
    ttft_s: float
    tpot_s: float
    sibling: bool
    ttft_bar: float = math.inf
    tpot_bar: float = math.inf

    def seconds(self, metric: str) -> tuple[float, float]:
        """(predicted, measured)"""
        return (self.ttft_s, self.cell.ttft_s) if metric == "ttft" else (self.tpot_s, self.cell.tpot_s)

    def error(self, metric: str) -> float:
        """Relative, unsigned."""
        predicted, measured = self.seconds(metric)
        return abs(predicted / measured - 1.0)

    def log_error(self, metric: str) -> float:
        predicted, measured = self.seconds(metric)
        return abs(math.log(predicted / measured))

    def within(self, metric: str) -> bool:
        return self.log_error(metric) <= math.log1p(self.ttft_bar if metric == "ttft" else self.tpot_bar)


@dataclass(frozen=True)
class Calibration:
    """A fit, what it was fitted on, and the error bars its own cross-validation learnt."""

    fitted: Fitted
    trained: frozenset[Key]
    bars: Bars

    def predict(self, cells: Sequence[Cell]) -> list[Prediction]:
        """A deployment that was in training counts as having a sibling."""
        if not cells:
            return []
        ttft, tpot = self.fitted.predict(cells)
        return [self._one(*one) for one in zip(cells, ttft.tolist(), tpot.tolist(), strict=True)]

    def cost_model(self, cell: Cell) -> CostModel:
        """For a simulator, with the error bars of the cell's deployment."""
        errors = {metric: bar(self.bars, metric, self._sibling(cell.key)) for metric in METRICS}
        return replace(self.fitted.cost_model(cell), error=errors)

    def _one(self, cell: Cell, ttft_s: float, tpot_s: float) -> Prediction:
        one = Prediction(cell=cell, ttft_s=ttft_s, tpot_s=tpot_s, sibling=self._sibling(cell.key))
        return _with_bars(one, self.bars)

    def _sibling(self, key: Key) -> bool:
        return any(_kin(key) == _kin(other) for other in self.trained)


def calibrate(cells: Sequence[Cell], progress: Progress | None = None) -> Calibration:
    """Fit on all of `cells`; bars from leaving out its deployments in turn."""
    left_out = cross_validate(cells, progress=progress)
    return Calibration(_fit(cells), frozenset(cell.key for cell in cells), bars(left_out))


def cross_validate(
    cells: Sequence[Cell], apart: Sequence[Cell] = (), progress: Progress | None = None
) -> list[Prediction]:
    """Predictions of every cell, and of those of `apart`, by a fit on the other deployments' `cells`.

    The bars of a deployment come from the left-out errors of the others.
    """
    keys = list(dict.fromkeys(cell.key for cell in cells))
    left_out: dict[Key, list[Prediction]] = {}
    for done, key in enumerate(keys):
        rest = [cell for cell in cells if cell.key != key]
        fold = Calibration(_fit(rest), frozenset(cell.key for cell in rest), {})
        left_out[key] = fold.predict([cell for cell in (*cells, *apart) if cell.key == key])
        if progress is not None:
            progress(done + 1, len(keys))
    scored = []
    chosen = set(map(id, cells))
    for key, own in left_out.items():
        learnt = bars(p for k, others in left_out.items() if k != key for p in others if id(p.cell) in chosen)
        scored += [_with_bars(prediction, learnt) for prediction in own]
    return scored


def bars(predictions: Iterable[Prediction]) -> Bars:
    """The COVERAGE quantile of left-out log errors, by metric and sibling; with its finite-sample correction."""
    found: dict[tuple[str, bool], list[float]] = {}
    for one in predictions:
        for metric in METRICS:
            found.setdefault((metric, one.sibling), []).append(one.log_error(metric))
    return {key: _quantile(errors) for key, errors in found.items()}


def summary(predictions: Sequence[Prediction]) -> dict[str, float | int | None]:
    """Mean and median error of both metrics, and the share of cells within their bars; None without cells."""
    row: dict[str, float | int | None] = {"cells": len(predictions)}
    for metric in METRICS:
        errors = [one.error(metric) for one in predictions]
        row[f"{metric}_mape"] = fmean(errors) if errors else None
        row[f"{metric}_median"] = median(errors) if errors else None
        row[f"{metric}_within_bar"] = fmean(one.within(metric) for one in predictions) if errors else None
    return row


def _fit(cells: Sequence[Cell]) -> Fitted:
    if len({cell.key for cell in cells}) < 2:
        raise ForgeError("measured serving points: fewer than two deployments are left to fit on")
    return fit(cells)


def _kin(key: Key) -> tuple[str, str]:
    return key.model, key.backend


def _with_bars(one: Prediction, learnt: Bars) -> Prediction:
    ttft, tpot = (bar(learnt, metric, one.sibling) for metric in METRICS)
    return replace(one, ttft_bar=ttft, tpot_bar=tpot)


def bar(learnt: Bars, metric: str, sibling: bool) -> float:
    """As a fraction; infinite where too little was left out to say."""
    return math.expm1(learnt.get((metric, sibling), math.inf))


def _quantile(errors: Sequence[float]) -> float:
    rank = math.ceil((len(errors) + 1) * COVERAGE)
    return sorted(errors)[rank - 1] if rank <= len(errors) else math.inf
