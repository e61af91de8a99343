"""How much the scaffold matters: the same tasks scored in several, and how far apart the means lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from forge.metrics.intervals import RESAMPLES, Interval, paired_interval
from forge.types import ForgeError, Json

#: task -> score, by scaffold
Scores = Mapping[str, Mapping[str, float]]
ESTIMATORS = {
    "mean": "over tasks; 95% bounds by a bootstrap over tasks",
    "gain": "mean minus that of the first scaffold, task by task; 95% bounds by a bootstrap over tasks",
    "sd": "standard deviation between the scaffolds' means; 95% bounds by a bootstrap over tasks, the same for all",
    "sd_if_alike": "the mean of `sd` where scores are dealt anew among the scaffolds within each task: what noise "
    "alone would make of scaffolds that are all alike",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Between scaffolds. `least` and `most` name the lowest and the highest mean."""

    sd: float
    low: float
    high: float
    sd_if_alike: float
    least: str
    most: str
    range: tuple[float, float]

    def to_dict(self) -> Json:
        return asdict(self)


def means(scores: Scores, *, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, Interval]:
    """Of every scaffold. Raises ForgeError unless all scored the same tasks."""
    table = _table(scores)
    drawn = _resampled(table, resamples, seed)
    bounds = np.quantile(drawn, [0.025, 0.975], axis=0)
    return {
        name: Interval(mean=float(table[i].mean()), low=float(bounds[0, i]), high=float(bounds[1, i]), n=table.shape[1])
        for i, name in enumerate(scores)
    }


def gains(scores: Scores) -> dict[str, Interval]:
    """Of every scaffold but the first over the first."""
    first, *others = scores
    return {name: paired_interval(scores[first], scores[name]) for name in others}


def spread(scores: Scores, *, resamples: int = 2000, seed: int = 0) -> Spread | None:
    """None of fewer than two scaffolds."""
    table, names = _table(scores), list(scores)
    if len(names) < 2:
        return None
    found = table.mean(axis=1)
    low, high = np.quantile(_resampled(table, resamples, seed).std(axis=1, ddof=1), [0.025, 0.975])
    rng = np.random.default_rng(seed)
    alike = [rng.permuted(table, axis=0).mean(axis=1).std(ddof=1) for _ in range(200)]
    return Spread(
        sd=float(found.std(ddof=1)),
        low=float(low),
        high=float(high),
        sd_if_alike=float(np.mean(alike)),
        least=names[int(found.argmin())],
        most=names[int(found.argmax())],
        range=(float(found.min()), float(found.max())),
    )


def _table(scores: Scores) -> NDArray[np.float64]:
    """[scaffold, task]."""
    tasks: Sequence[str] = sorted(next(iter(scores.values()), {}))
    if not tasks or any(set(of) != set(tasks) for of in scores.values()):
        raise ForgeError("scores: every scaffold must have scored the same tasks, one at least")
    return np.array([[of[task] for task in tasks] for of in scores.values()], dtype=np.float64)


def _resampled(table: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """[resample, scaffold]: means over tasks drawn with replacement, the same ones for all scaffolds."""
    rng, tasks = np.random.default_rng(seed), table.shape[1]
    counts = rng.multinomial(tasks, np.full(tasks, 1.0 / tasks), size=resamples)
    drawn: NDArray[np.float64] = counts @ table.T / tasks
    return drawn
