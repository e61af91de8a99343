"""How sure a choice is, and which keys mattered."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sim.choose import OBJECTIVES, SPEED, UNREST, Judged, choose
from sim.measure import intervals
from sim.tunable import Value

RESAMPLES = 200
BINS = 4  # of a key with many values: its quartiles


def again(judged: Sequence[Judged]) -> list[tuple[Judged, float]]:
    """Who is chosen, and how often, when the seeds are drawn anew with replacement: most often first.

    A bootstrap over seeds of the choice among the candidates that may be chosen; few seeds make it too sure of itself.
    """
    feasible = [j for j in judged if j.feasible]
    rng, seeds = np.random.default_rng(0), len(feasible[0].runs)
    wins: Counter[int] = Counter()
    place = {one.candidate: i for i, one in enumerate(feasible)}
    for _ in range(RESAMPLES):
        drawn = rng.integers(0, seeds, seeds).tolist()
        those = [_redrawn(one, drawn) for one in feasible]
        wins[place[choose(those).chosen.candidate]] += 1
    return [(feasible[i], count / RESAMPLES) for i, count in sorted(wins.items(), key=lambda pair: (-pair[1], pair[0]))]


def _redrawn(one: Judged, drawn: Sequence[int]) -> Judged:
    """With the figures that a choice reads."""
    runs = tuple({key: one.runs[i][key] for key in (SPEED, UNREST)} for i in drawn)
    return replace(one, runs=runs, figures=intervals(runs), j=(0.0, 0.0))


def importances(judged: Sequence[Judged]) -> dict[str, dict[str, float]]:
    """By objective and key: the share of the variance between candidates that the key's main effect explains
    (omega squared, at least 0), over candidates that have the key. Keys that took one value are left out."""
    found: dict[str, dict[str, float]] = {}
    for key in OBJECTIVES:
        known = [(dict(j.candidate.point), j.figures[key].mean) for j in judged if key in j.figures]
        paths = list(dict.fromkeys(path for point, _ in known for path in point))
        shares = {path: _share([(point[path], y) for point, y in known if path in point]) for path in paths}
        found[key] = {path: share for path, share in shares.items() if share is not None}
    return found


def _share(pairs: Sequence[tuple[Value, float]]) -> float | None:
    groups: dict[object, list[float]] = defaultdict(list)
    for group, (_, y) in zip(_groups([x for x, _ in pairs]), pairs, strict=True):
        groups[group].append(y)
    n, k = len(pairs), len(groups)
    if k < 2:
        return None
    mean = sum(y for _, y in pairs) / n
    total = sum((y - mean) ** 2 for _, y in pairs)
    between = sum(len(ys) * (sum(ys) / len(ys) - mean) ** 2 for ys in groups.values())
    if total <= 0 or n <= k:
        return 0.0
    noise = (total - between) / (n - k)
    return max(0.0, (between - (k - 1) * noise) / (total + noise))


def _groups(values: Sequence[Value]) -> list[object]:
    """Of equal values; of numbers with many of them, by quartile."""
    numbers = [v for v in values if isinstance(v, int | float)]
    if len(numbers) < len(values) or len(set(values)) <= 2 * BINS:
        return list(values)
    edges = np.quantile(numbers, [i / BINS for i in range(1, BINS)])
    return [int(np.searchsorted(edges, number, side="right")) for number in numbers]
