"""The search space of tuning: keys of a scenario, and over which values each may vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from forge.scenario import Scenario
from sim.tunable import FLEET, Point, Value, applies


@dataclass(frozen=True, slots=True)
class Choices:
    """One of several values, in no order."""

    path: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.values))

    def pick(self, trial: optuna.Trial) -> Value:
        picked = trial.suggest_categorical(self.path, self.values)
        assert picked is not None
        return picked

    def distribution(self) -> BaseDistribution:
        return CategoricalDistribution(self.values)

    def every(self) -> tuple[Value, ...] | None:
        return self.values


@dataclass(frozen=True, slots=True)
class Span:
    """From `low` to `high`, both included: whole numbers or real ones, on a grid where there is a `step`, evenly by
    ratio where `log`."""

    path: str
    low: float
    high: float
    whole: bool = False
    step: float | None = None
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}{' log' if self.log else f' step {self.step:g}' if self.step else ''}"

    def pick(self, trial: optuna.Trial) -> Value:
        if self.whole:
            return trial.suggest_int(self.path, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return trial.suggest_float(self.path, self.low, self.high, step=self.step, log=self.log)

    def distribution(self) -> BaseDistribution:
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=int(self.step or 1))
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def every(self) -> tuple[Value, ...] | None:
        """None: too many to list."""
        if self.whole:
            return tuple(range(int(self.low), int(self.high) + 1, int(self.step or 1)))
        if self.step is None:
            return None
        steps = int((self.high - self.low) / self.step + 1e-9)
        return tuple(round(self.low + i * self.step, 12) for i in range(steps + 1))


Dimension = Choices | Span


@dataclass(frozen=True, slots=True)
class Space:
    """`dimensions`: kinds of slots first, since the keys of a kind count only where it is chosen. `kinds`: what the
    scenario's slots hold. `points`: where only these are worth a trial."""

    dimensions: tuple[Dimension, ...]
    kinds: Mapping[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] | None = None

    def suggest(self, trial: optuna.Trial) -> Point:
        """A point that the sampler wants tried."""
        point: Point = ()
        for dimension in self.dimensions:
            if applies(dimension.path, self._kinds_at(point)):
                point += ((dimension.path, dimension.pick(trial)),)
        return point

    def every(self) -> Iterator[Point] | None:
        """All points, in a fixed order; None where a key has too many values to list."""
        if self.points is not None:
            return iter(self.points)
        if any(dimension.every() is None for dimension in self.dimensions):
            return None
        return self._from(())

    def _from(self, point: Point, depth: int = 0) -> Iterator[Point]:
        if depth == len(self.dimensions):
            yield point
            return
        dimension = self.dimensions[depth]
        if not applies(dimension.path, self._kinds_at(point)):
            yield from self._from(point, depth + 1)
            return
        for value in dimension.every() or ():
            yield from self._from((*point, (dimension.path, value)), depth + 1)

    def own(self, scenario: Scenario) -> Point:
        """The scenario's own values: the point that changes nothing."""
        return tuple((d.path, _held(scenario, d.path)) for d in self.dimensions if applies(d.path, self.kinds))

    def distributions(self, point: Point) -> dict[str, BaseDistribution]:
        there = dict(point)
        return {d.path: d.distribution() for d in self.dimensions if d.path in there}

    def label(self, point: Point) -> str:
        """A point by the keys that vary."""
        fixed = {d.path for d in self.dimensions if isinstance(d, Choices) and len(d.values) == 1}
        return ", ".join(f"{path.removeprefix('policy.')} = {_short(v)}" for path, v in point if path not in fixed)

    @property
    def varies_fleet(self) -> bool:
        return any(dimension.path.startswith(FLEET) for dimension in self.dimensions)

    def _kinds_at(self, point: Point) -> dict[str, str]:
        chosen = {path.split(".")[1]: str(value) for path, value in point if path.endswith(".kind")}
        return {**self.kinds, **chosen}


def kinds_held(scenario: Scenario) -> dict[str, str]:
    return {slot: policy.kind for slot, policy in scenario.policy.slots().items()}


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _held(scenario: Scenario, path: str) -> Value:
    held: object = scenario
    for part in path.split("."):
        held = getattr(held, part)
    assert isinstance(held, bool | int | float | str)
    return held
