"""Judging a sweep: which candidates keep the budgets, which is chosen, and what may be said of J.

Candidates met the same work seed by seed, so they are compared by paired differences, not by overlapping bands
whose width is mostly the luck of the draw that they share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forge.metrics.efficiency import bounds
from forge.metrics.intervals import Interval, mean_interval
from forge.sections import Efficiency
from forge.types import ForgeError
from sim.candidates import Candidate
from sim.measure import KEYS, Figures, intervals

#: Non-stationarities closer than this are the same to us: then the smaller lag bound decides.
STEP = 0.05

SPEED, LAG, UNREST, WAIT = "trained_tokens_per_s", "lag_items_max", "nonstationarity", "ttft_s.p99"
RESTLESS = "non-stationarity"  # how a reason begins that the own policy may overrule
#: what is traded against each other: the label, and whether more is better
OBJECTIVES = {
    SPEED: ("trained tokens/s", True),
    LAG: ("largest lag (items)", False),
    UNREST: ("non-stationarity (1: random order)", False),
    WAIT: ("p99 time to first token (s)", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """What a choice may cost. `nonstationarity`: 1 is what random order of the same items would have (DESIGN).

    `lag_items`: largest lag bound; None: no limit.
    """

    nonstationarity: float = 1.0
    lag_items: int | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One candidate over its seeds, of which those it was dropped after are the first. `reason`: why it may not be
    chosen; None: it is feasible. `j` is None where a figure is missing."""

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
    runs: Mapping[Candidate, tuple[Figures, ...]],
    batch: int,
    budgets: Budgets,
    efficiency: Efficiency,
    refused: Mapping[Candidate, str] | None = None,
    own: Candidate | None = None,
) -> list[Judged]:
    """Figures and feasibility of every candidate; `runs` are in the order of the seeds, `refused` why some were not
    run on all of them, `own` the scenario's own policy.

    Within the budget of non-stationarity by right are strict order, since no scheduler can ask for less, and the own
    policy where it is not shown to exceed it; then also what is not more non-stationary than that, seed by seed.
    """
    judged = []
    accepted = () if own is None else _accepted(runs[own], budgets)
    for candidate, mine in runs.items():
        figures = intervals(mine) if mine else {}
        reason = (refused or {}).get(candidate) or _refusal(candidate, figures, budgets)
        if reason and reason.startswith(RESTLESS) and _as_calm(mine, accepted):
            reason = None
        judged.append(Judged(candidate, mine, figures, _j(figures, batch, efficiency), reason))
    return _mark_pareto(judged)


def _accepted(own: tuple[Figures, ...], budgets: Budgets) -> tuple[Figures, ...]:
    """The own policy's runs where its non-stationarity may be within the budget."""
    unrest = intervals(own).get(UNREST) if own else None
    return own if unrest is not None and unrest.low <= budgets.nonstationarity else ()


def _as_calm(mine: Sequence[Figures], accepted: Sequence[Figures]) -> bool:
    """The paired difference in non-stationarity is at most STEP, in its upper bound."""
    more = [a[UNREST] - b[UNREST] for a, b in zip(mine, accepted, strict=False)]
    return bool(more) and mean_interval(more).high <= STEP


def hopeless(candidate: Candidate, runs: Mapping[Candidate, Sequence[Figures]], own: Candidate, limit: float) -> str:
    """Why a candidate needs no more seeds, after some that all of `runs` met; "": it does.

    Beaten: on every seed another is faster and in nothing worse. Restless: on every seed above the budget (`limit`) and
    above the scenario's own policy.
    """
    mine = runs[candidate]
    if any(key not in figures for figures in mine for key in OBJECTIVES):
        return ""
    calmest = [max(limit, figures.get(UNREST, limit)) for figures in runs[own]]
    if candidate.window != 1 and all(f[UNREST] > most for f, most in zip(mine, calmest, strict=True)):
        return f"non-stationarity above the budget of {limit:g} on each of {len(mine)} seeds"
    for other, theirs in runs.items():
        if other.devices <= candidate.devices and all(map(_beats, theirs, mine)):
            return f"on each of {len(mine)} seeds slower than another and in nothing better"
    return ""


def _beats(one: Figures, other: Figures) -> bool:
    """Faster and in nothing worse."""
    if any(key not in one for key in OBJECTIVES):
        return False
    return one[SPEED] > other[SPEED] and all(one[key] <= other[key] for key in (LAG, UNREST, WAIT))


def _missing(figures: Mapping[str, object]) -> list[str]:
    return [key for key in KEYS if key not in figures]


def _refusal(candidate: Candidate, figures: dict[str, Interval], budgets: Budgets) -> str | None:
    bound = candidate.lag_bound
    if budgets.lag_items is not None and (bound is None or bound > budgets.lag_items):
        most = "without bound" if bound is None else f"of up to {bound} items"
        return f"lag {most}, above the budget of {budgets.lag_items}"
    if missing := _missing(figures):
        return f"its runs are too short to have {', '.join(missing)}"
    unrest = figures[UNREST].high
    if candidate.window != 1 and unrest > budgets.nonstationarity:
        return f"{RESTLESS} of up to {unrest:.3g}, above the budget of {budgets.nonstationarity:g}"
    return None


def _j(figures: dict[str, Interval], batch: int, efficiency: Efficiency) -> tuple[float, float] | None:
    if _missing(figures):
        return None
    worst, best = bounds(efficiency, figures["lag_items_mean"].mean / batch, figures[UNREST].mean)
    speed = figures[SPEED]
    return max(0.0, speed.low) * worst, speed.high * best


def choose(judged: Sequence[Judged]) -> Choice:
    """The most trained tokens per second within the budgets; among those that tie with it the fewest devices, the least
    non-stationary, then the smallest lag bound. Raises ForgeError where nothing is feasible."""
    feasible = [j for j in judged if j.feasible]
    if not feasible:
        short = next((j.reason for j in judged if j.reason and "too short" in j.reason), None)
        if short:
            raise ForgeError(f"stop: no candidate can be judged: {short}; let the scenario run for longer")
        raise ForgeError(f"no candidate may be chosen: {judged[0].reason}; raise the budget, or widen the space")
    fastest = max(feasible, key=lambda j: j.figures[SPEED].mean)
    tied = [j for j in feasible if _ties(j, fastest)]
    chosen = min(tied, key=_preference)
    return Choice(chosen, fastest, len(tied), len(feasible), _clear_winner(judged))


def _preference(judged: Judged) -> tuple[int, int, float, tuple[int, int, int, str]]:
    one = judged.candidate
    bound = float("inf") if one.lag_bound is None else one.lag_bound
    return one.devices, round(judged.figures[UNREST].mean / STEP), bound, one.order()


def ranges_of_j(judged: Sequence[Judged]) -> list[tuple[tuple[float, float], Judged]]:
    """Of candidates that were run on all seeds: those dropped early are known too little."""
    most = max(len(j.runs) for j in judged)
    return [(j.j, j) for j in judged if j.j is not None and len(j.runs) == most]


def _clear_winner(judged: Sequence[Judged]) -> Judged | None:
    ranges = ranges_of_j(judged)
    (low, _), best = max(ranges, key=lambda pair: pair[0][0])
    return best if all(j is best or high < low for (_, high), j in ranges) else None


def gain(one: Judged, over: Judged, key: str) -> Interval:
    """Of one figure: the mean paired difference over the seeds that both met, with 95% bounds."""
    pairs = zip(one.runs, over.runs, strict=False)
    return mean_interval([a[key] - b[key] for a, b in pairs])


def _ties(one: Judged, fastest: Judged) -> bool:
    """The 95% interval of the paired difference in throughput contains 0."""
    return gain(fastest, one, SPEED).low <= 0.0


def costs(judged: Judged) -> tuple[float, ...]:
    """The objectives as what is to be little, devices last."""
    of = judged.figures
    return (
        *(-of[key].mean if more else of[key].mean for key, (_, more) in OBJECTIVES.items()),
        judged.candidate.devices,
    )


def _mark_pareto(judged: list[Judged]) -> list[Judged]:
    """Among those that were run on all seeds: nothing else is at least as good in every objective and better in one."""
    most = max((len(j.runs) for j in judged), default=0)
    known = {j.candidate: costs(j) for j in judged if len(j.runs) == most and not _missing(j.figures)}

    def beaten(mine: tuple[float, ...]) -> bool:
        return any(all(a <= b for a, b in zip(other, mine, strict=True)) and other != mine for other in known.values())

    return [replace(j, pareto=j.candidate in known and not beaten(known[j.candidate])) for j in judged]
