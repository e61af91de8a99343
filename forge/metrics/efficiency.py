"""Sample efficiency as a model with parameters, and J with it: intervals, since each parameter is a range."""

from __future__ import annotations

from forge.sections import Efficiency

#: what `bounds` computes, for the reader of a figure
MODEL = (
    "1 / ((1 + per_lag_step x lag) (1 + per_excess x max(0, nonstationarity - 1))), lag the mean in trainer steps, "
    "parameters anywhere in the ranges of the scenario's [efficiency]; 1 is fresh, mixed data"
)


def bounds(model: Efficiency, lag_steps: float, nonstationarity: float) -> tuple[float, float]:
    """Lowest and highest sample efficiency the model allows, in (0, 1].

    `lag_steps`: mean lag of what was trained on, in trainer steps; `nonstationarity`: 1 is chance.
    """

    def value(per_lag_step: float, per_excess: float) -> float:
        return 1.0 / ((1.0 + per_lag_step * lag_steps) * (1.0 + per_excess * max(0.0, nonstationarity - 1.0)))

    (least_lag, most_lag), (least_excess, most_excess) = model.per_lag_step, model.per_excess
    return value(most_lag, most_excess), value(least_lag, least_excess)
