"""The candidates of a sweep: window fraction x N x concurrency, all under the scenario's lag budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge.policies import WindowedFifo
from forge.queue import window_size
from forge.scenario import Scenario
from forge.types import ForgeError

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # 0: a window of 1, strict order


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """Queue numbers in items, and the window fraction that gives W for this N."""

    n: int
    concurrency: int
    window: int
    fraction: float

    @property
    def lag_bound(self) -> int:
        return self.n + self.window - 2

    def of(self, scenario: Scenario) -> Scenario:
        """The scenario with these queue numbers and a windowed scheduler."""
        queue = scenario.queue.model_copy(update={"n": self.n, "concurrency": self.concurrency})
        policy = replace(scenario.policy, scheduler=WindowedFifo(fraction=self.fraction))
        return scenario.model_copy(update={"queue": queue, "policy": policy})


def candidates(
    scenario: Scenario,
    fractions: Sequence[float] = FRACTIONS,
    ns: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
) -> list[Candidate]:
    """All legal combinations. Raises ForgeError where the lag budget leaves none.

    By default N is the scenario's and, under a lag budget, the largest that fits strict order, W = 0.3 N and greedy;
    the concurrency is the scenario's, N and N/2. Strict order is always among the windows: the rest is judged by it.
    """
    shape, budget = scenario.shape(), scenario.queue.lag_budget
    least = shape.batch * shape.publish_every
    found: set[Candidate] = set()
    for n in ns or _default_ns(scenario):
        given = concurrencies or (scenario.queue.concurrency, n, max(1, n // 2))
        windows = {window_size(f, n): max(f, 1.0 / n) for f in sorted({0.0, *fractions}, reverse=True)}
        for window, fraction in windows.items():
            for c in given:
                candidate = Candidate(n, c, window, fraction)
                if least <= n and c <= n and (budget is None or candidate.lag_bound <= budget):
                    found.add(candidate)
    if not found:
        raise ForgeError(
            f"queue.lag_budget = {budget}: no N in reach has N + W - 2 <= {budget} and N >= {least} "
            f"(publish every {shape.publish_every} x batch {shape.batch}); raise the budget or lower queue.batch"
        )
    return sorted(found)


def _default_ns(scenario: Scenario) -> list[int]:
    budget = scenario.queue.lag_budget
    if budget is None:
        return [scenario.queue.n]
    return sorted({scenario.queue.n, *(_largest_n(f, budget) for f in (0.0, 0.3, 1.0))})


def _largest_n(fraction: float, budget: int) -> int:
    return max(n for n in range(1, budget + 2) if n == 1 or n + window_size(fraction, n) - 2 <= budget)
