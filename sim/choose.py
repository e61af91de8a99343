"""Judging a sweep: which candidates keep the budgets, which is chosen, and what may be said of J.

Candidates met the same work seed by seed, so they are compared by paired differences, not by overlapping bands
whose width is mostly the luck of the draw that they share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forge.metrics.efficiency import bounds
from forge.metrics.intervals import Interval, mean_interval
from forge.sections import Efficiency
from forge.types import ForgeError
from sim.candidates import Candidate
from sim.measure import KEYS, Figures, intervals

#: Non-stationarities closer than this are the same to us: then the smaller lag bound decides.
STEP = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a choice may cost. `nonstationarity`: 1 is what random order of the same items would have (DESIGN).

    `lag_items`: largest lag bound; None: no limit.
    """

    nonstationarity: float = 1.0
    lag_items: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate over all seeds. `reason`: why it may not be chosen; None: it is feasible. `j` is None where a
    figure is missing."""

    candidate: Candidate
    runs: tuple[Figures, ...]
    figures: dict[str, Interval]
    j: tuple[float, float] | None
    reason: str | None
    pareto: bool = False

    @property
    def feasible(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Choice:
    """`tied`: feasible candidates whose throughput cannot be told from the fastest's. `by_j`: the winner by J or None
    where intervals overlap."""

    chosen: Judged
    fastest: Judged
    tied: int
    feasible: int
    by_j: Judged | None


def judge(
    runs: dict[Candidate, tuple[Figures, ...]], batch: int, budgets: Budgets, efficiency: Efficiency
) -> list[Judged]:
    """Figures and feasibility of every candidate; `runs` are in the order of the seeds.

    Strict order is within the budget of non-stationarity by right: no scheduler can ask for less.
    """
    judged = []
    for candidate, mine in runs.items():
        figures = intervals(mine)
        reason = _refusal(candidate, figures, budgets)
        judged.append(Judged(candidate, mine, figures, _j(figures, batch, efficiency), reason))
    return _mark_pareto(judged)


def _missing(figures: dict[str, Interval]) -> list[str]:
    return [key for key in KEYS if key not in figures]


def _refusal(candidate: Candidate, figures: dict[str, Interval], budgets: Budgets) -> str | None:
    if missing := _missing(figures):
        return f"its runs are too short to have {', '.join(missing)}"
    if budgets.lag_items is not None and candidate.lag_bound > budgets.lag_items:
        return f"lag of up to {candidate.lag_bound} items, above the budget of {budgets.lag_items}"
    unrest = figures["nonstationarity"].high
    if candidate.window > 1 and unrest > budgets.nonstationarity:
        return f"non-stationarity of up to {unrest:.3g}, above the budget of {budgets.nonstationarity:g}"
    return None


def _j(figures: dict[str, Interval], batch: int, efficiency: Efficiency) -> tuple[float, float] | None:
    if _missing(figures):
        return None
    worst, best = bounds(efficiency, figures["lag_items_mean"].mean / batch, figures["nonstationarity"].mean)
    speed = figures["trained_tokens_per_s"]
    return max(0.0, speed.low) * worst, speed.high * best


def choose(judged: Sequence[Judged]) -> Choice:
    """The most trained tokens per second within the budgets; among those that tie with it the least non-stationary,
    then the smallest lag bound. Strict order keeps the budgets by right: only runs that are too short leave nothing to
    choose, which is a ForgeError."""
    feasible = [j for j in judged if j.feasible]
    if not feasible:
        raise ForgeError(f"stop: no candidate can be judged: {judged[0].reason}; let the scenario run for longer")
    fastest = max(feasible, key=lambda j: j.figures["trained_tokens_per_s"].mean)
    tied = [j for j in feasible if _ties(j, fastest)]
    chosen = min(tied, key=lambda j: (round(_unrest(j) / STEP), j.candidate.lag_bound, j.candidate))
    return Choice(chosen, fastest, len(tied), len(feasible), _clear_winner(judged))


def _clear_winner(judged: Sequence[Judged]) -> Judged | None:
    ranges = [(j.j, j) for j in judged if j.j is not None]
    (low, _), best = max(ranges, key=lambda pair: pair[0][0])
    return best if all(j is best or high < low for (_, high), j in ranges) else None


def _unrest(judged: Judged) -> float:
    return judged.figures["nonstationarity"].mean


def _ties(one: Judged, fastest: Judged) -> bool:
    """The 95% interval of the paired difference in throughput contains 0."""
    pairs = zip(fastest.runs, one.runs, strict=True)
    return mean_interval([a["trained_tokens_per_s"] - b["trained_tokens_per_s"] for a, b in pairs]).low <= 0.0


def _mark_pareto(judged: list[Judged]) -> list[Judged]:
    """Nothing else is at least as good in throughput, lag and non-stationarity and better in one."""

    def costs(j: Judged) -> tuple[float, float, float]:
        return -j.figures["trained_tokens_per_s"].mean, j.figures["lag_items_max"].mean, _unrest(j)

    known = {j.candidate: costs(j) for j in judged if not _missing(j.figures)}

    def beaten(mine: tuple[float, float, float]) -> bool:
        return any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in known.values())

    return [replace(j, pareto=j.candidate in known and not beaten(known[j.candidate])) for j in judged]
