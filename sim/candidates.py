"""Candidates of tuning: a point of the search space as a scenario; and the space where none is given, window fraction
x N x concurrency under the scenario's lag budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.queue import window_size
from forge.scenario import Scenario, parse, resolved
from forge.types import ForgeError
from sim.space import Choices, Space, kinds_held
from sim.tunable import Point, Value

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # 0: a window of 1, strict order


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point, and what it makes of the queue (in items) and of the fleet. `window` None: no window.

    `lag_bound`: largest possible lag in items, None: unbounded. `devices`: of all instances; without a deployment,
    instances.
    """

    n: int
    concurrency: int
    window: int | None
    lag_bound: int | None
    devices: int
    point: Point

    def of(self, scenario: Scenario) -> Scenario:
        return at(scenario, self.point)

    def order(self) -> tuple[int, int, int, str]:
        """Total, for ties."""
        return self.n, self.concurrency, self.n + 1 if self.window is None else self.window, repr(self.point)


def candidate(scenario: Scenario, point: Point) -> Candidate:
    """Raises ForgeError where the scenario is none at this point (a queue that would deadlock, ...) or exceeds its lag
    budget: no such candidate is ever simulated."""
    there = at(scenario, point)
    there.check_lag_budget()
    return unchecked(there, point)


def unchecked(there: Scenario, point: Point) -> Candidate:
    """Of the scenario at the point, whatever its lag."""
    shape = there.shape()
    return Candidate(shape.n, there.queue.concurrency, shape.window, shape.lag_items_bound, devices(there), point)


def at(scenario: Scenario, point: Point) -> Scenario:
    """The scenario with the point's values. A concurrency that is no key of the space is at most N."""
    data = resolved(scenario)
    for path, value in sorted(point, key=lambda pair: not pair[0].endswith(".kind")):
        _put(data, path, value)
    paths = {path for path, _ in point}
    if "queue.n" in paths:
        data["queue"]["n_from_lag_budget"] = False
    if "queue.concurrency" not in paths:
        data["queue"]["concurrency"] = min(data["queue"]["concurrency"], data["queue"]["n"])
    return parse(data, scenario.name)


def devices(scenario: Scenario) -> int:
    on, instances = scenario.sim.deployment, scenario.engine.instances
    if on is None:
        return instances
    behind = on.prefill
    return on.tp * on.dp * instances + (behind.tp * behind.dp * behind.instances if behind else 0)


def default_space(
    scenario: Scenario,
    fractions: Sequence[float] = FRACTIONS,
    ns: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
) -> Space:
    """All legal combinations. Raises ForgeError where the lag budget leaves none.

    By default N is the scenario's and, under a lag budget, the largest that fits strict order, W = 0.3 N and greedy;
    the concurrency is the scenario's, N and N/2. Strict order is always among the windows: the rest is judged by it.
    """
    shape, budget = scenario.shape(), _ordinary_budget(scenario)
    least = shape.batch * shape.publish_every + shape.park_items
    found: set[tuple[int, int, int, float]] = set()
    for n in ns or _default_ns(scenario):
        given = concurrencies or (scenario.queue.concurrency, n, max(1, n // 2))
        windows = {window_size(f, n): max(f, 1.0 / n) for f in sorted({0.0, *fractions}, reverse=True)}
        for window, fraction in windows.items():
            fits = least <= n and (budget is None or n + window - 2 <= budget)
            found |= {(n, c, window, fraction) for c in given if fits and c <= n}
    if not found:
        raise ForgeError(
            f"queue.lag_budget = {scenario.queue.lag_budget}: no N in reach has N + W - 2 <= {budget} and N >= {least} "
            f"(publish every {shape.publish_every} x batch {shape.batch}); raise the budget or lower queue.batch"
        )
    return _listed(scenario, [(n, c, fraction) for n, c, _, fraction in sorted(found)])


def _listed(scenario: Scenario, numbers: list[tuple[int, int, float]]) -> Space:
    kind, fraction, n, concurrency = (
        "policy.scheduler.kind",
        "policy.scheduler.fraction",
        "queue.n",
        "queue.concurrency",
    )
    points = tuple(((kind, "windowed_fifo"), (fraction, f), (n, m), (concurrency, c)) for m, c, f in numbers)
    values: dict[str, set[Any]] = {}
    for point in points:
        for path, value in point:
            values.setdefault(path, set()).add(value)
    dimensions = tuple(Choices(path, tuple(sorted(seen))) for path, seen in values.items())
    return Space(dimensions, kinds_held(scenario), points)


def _default_ns(scenario: Scenario) -> list[int]:
    budget = _ordinary_budget(scenario)
    if budget is None:
        return [scenario.queue.n]
    return sorted({scenario.queue.n, *(_largest_n(f, budget) for f in (0.0, 0.3, 1.0))})


def _ordinary_budget(scenario: Scenario) -> int | None:
    """Of items that are never parked, which may lag by that much less."""
    shape, budget = scenario.shape(), scenario.queue.lag_budget
    return budget - shape.park_reach if budget is not None and shape.park_items else budget


def _largest_n(fraction: float, budget: int) -> int:
    return max(n for n in range(1, max(0, budget) + 2) if n == 1 or n + window_size(fraction, n) - 2 <= budget)


def _put(data: dict[str, Any], path: str, value: Value) -> None:
    """Another kind of policy knows nothing of the old one's keys."""
    *tables, key = path.split(".")
    table = data
    for part in tables:
        table = table[part]
    if tables[0] == "policy" and key == "kind" and table["kind"] != value:
        table.clear()
    table[key] = value
