"""The estimators of calibration: small, explicit, each stating what it assumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev

import numpy as np
from numpy.typing import NDArray

from forge import trace as ev
from forge.sections_sim import SimDomain
from sim.paths import Ask, Path, Paths

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    """Non-negative coefficients of a linear model, and its fit: R^2 and mean absolute relative error of totals."""

    coefficients: tuple[float, ...]
    r2: float
    error: float
    rows: int


def fit_line(columns: Array, y: Array) -> Line:
    """Least squares with coefficients >= 0. Rows weigh 1/sqrt(y): a span's noise grows with its length.

    Columns are few, so every subset is tried: the best one whose coefficients are all positive is the optimum.
    """
    weight = 1.0 / np.sqrt(np.maximum(y, 1e-12))
    best, least = np.zeros(columns.shape[1]), math.inf
    for size in range(1, columns.shape[1] + 1):
        for subset in combinations(range(columns.shape[1]), size):
            some = columns[:, subset] * weight[:, None]
            found, *_ = np.linalg.lstsq(some, y * weight, rcond=None)
            loss = float(np.sum((some @ found - y * weight) ** 2))
            if np.all(found >= 0) and loss < least * (1 - 1e-12):
                best, least = np.zeros(columns.shape[1]), loss
                best[list(subset)] = found
    fitted = columns @ best
    spread = float(np.sum((y - y.mean()) ** 2))
    r2 = 1.0 - float(np.sum((y - fitted) ** 2)) / spread if spread > 0 else 1.0
    error = float(np.mean(np.abs(fitted - y) / np.maximum(y, 1e-12)))
    return Line(tuple(map(float, best)), r2, error, len(y))


def usage_rows(events: Sequence[ev.Event]) -> Array:
    """Deltas between consecutive usage events of each instance: [busy_s, steps, decode tokens, prefill tokens].

    What engines had done before the first item, in an evaluation say, is where their counters begin.
    """
    submitted = False
    rows: list[tuple[float, ...]] = []
    last: dict[int, tuple[float, ...]] = {}
    for event in events:
        if isinstance(event, ev.Resumed):
            last = {}  # counters begin anew with the life
        submitted = submitted or isinstance(event, ev.Submitted)
        if not isinstance(event, ev.Usage):
            continue
        counters = zip(event.busy_s, event.steps, event.decode_tokens, event.prefill_tokens, strict=True)
        for i, now in enumerate(counters):
            delta = tuple(a - b for a, b in zip(now, last.get(i, (0.0,) * 4), strict=True))
            last[i] = tuple(map(float, now))
            if submitted and delta[0] > 0 and delta[1] > 0:
                rows.append(delta)
    return np.array(rows, dtype=np.float64).reshape(-1, 4)


def fit_domain(name: str, paths: Paths, fallback: SimDomain) -> SimDomain:
    """Workload of one domain; `fallback` where the trace holds none of its members.

    `item_share` is that of log lengths, which is too much where a member's own luck averages out over its turns:
    `sim.calibrate` corrects it.
    """
    mine = paths.of(name)
    ended = [p for p in mine if p.done is not None and p.done.reason != "timeout"]
    survivors = [p for p in ended if p.survived and p.asks]
    tokens = [ask.tokens for p in mine for ask in p.asks if ask.tokens > 0]
    if not survivors or not tokens:
        return fallback
    median, sigma = log_normal(tokens)
    counts = [len(p.asks) for p in survivors]
    growth = [b.prompt_tokens - a.prompt_tokens - a.tokens for p in mine for a, b in _turns(p)]
    difficulties = paths.difficulties[name]
    return SimDomain(
        turns=tuple(counts.count(n) / len(counts) for n in range(1, max(counts) + 1)),
        prompt_tokens=round(fmean(p.asks[0].prompt_tokens for p in mine if p.asks)),
        turn_tokens=max(0, round(fmean(growth))) if growth else 0,
        tokens_median=median,
        tokens_sigma=sigma,
        tokens_cap=max(tokens),
        item_share=shared_variance(log_lengths(name, paths)),
        difficulty_mean=fmean(difficulties),
        difficulty_sd=pstdev(difficulties),
        death_rate=sum(not p.survived for p in ended) / len(ended),
        reward=min(1.0, fmean(p.done.reward for p in survivors if p.done and p.done.reward is not None)),
    )


def _turns(path: Path) -> list[tuple[Ask, Ask]]:
    return [(a, b) for a, b in zip(path.asks, path.asks[1:], strict=False) if b.turn == a.turn + 1]


def log_lengths(domain: str, paths: Paths) -> list[list[float]]:
    """Logarithm of the tokens that each surviving member sampled, item by item."""
    groups = [[p for p in members.values() if p.domain == domain] for members in paths.items.values()]
    return [[math.log(max(1, p.tokens())) for p in group if p.survived] for group in groups]


def log_normal(values: Sequence[int]) -> tuple[float, float]:
    """Median and sigma with the values' mean logarithm and mean: throughput hangs on the mean, whatever the shape."""
    mu = fmean(map(math.log, values))
    return math.exp(mu), math.sqrt(max(0.0, 2.0 * (math.log(fmean(values)) - mu)))


def shared_variance(groups: Sequence[Sequence[float]]) -> float:
    """Intraclass correlation (one-way analysis of variance): the share of variance that members of a group share."""
    groups = [g for g in groups if len(g) > 1]
    count = sum(map(len, groups))
    if len(groups) < 2 or count == len(groups):
        return 0.0
    mean = fmean(v for g in groups for v in g)
    between = sum(len(g) * (fmean(g) - mean) ** 2 for g in groups) / (len(groups) - 1)
    within = sum((v - fmean(g)) ** 2 for g in groups for v in g) / (count - len(groups))
    size = count / len(groups)
    total = between + (size - 1.0) * within
    return min(1.0, max(0.0, (between - within) / total)) if total > 0 else 0.0


def fit_core(paths: Sequence[Path]) -> tuple[float, float, float]:
    """(request_cpu_s, request_latency_s, mean seconds measured) of the agent side: from ready to routed.

    An undisturbed request (the 5% quantile) takes work + latency. The work is then what makes first come, first
    served on one core, replayed over the measured arrivals, wait as long on average as was measured.
    """
    arrivals = sorted(arrival for path in paths for arrival in _arrivals(path))
    if not arrivals:
        return 0.0, 0.0, 0.0
    ready = [at for at, _ in arrivals]
    spans = [span for _, span in arrivals]
    mean, quiet = fmean(spans), float(np.quantile(spans, 0.05))
    low, high = 0.0, mean
    for _ in range(40):
        work = (low + high) / 2.0
        if _replayed_mean(ready, work) + max(0.0, quiet - work) < mean:
            low = work
        else:
            high = work
    return low, max(0.0, quiet - low), mean


def _arrivals(path: Path) -> list[tuple[float, float]]:
    """(ready, seconds until routed) of a member's requests. Tool waits are only known as its total, so a member's
    later turns share one mean."""
    if not path.asks or path.asks[0].turn != 0:
        return []
    first = path.asks[0]
    found = [(path.submitted_s, first.routed_s - path.submitted_s)]
    pairs = _turns(path)
    if path.survived and path.done is not None and pairs and len(pairs) == len(path.asks) - 1:
        gaps = sum(b.routed_s - a.completed_s for a, b in pairs) - path.done.tool_wait_s
        mean = max(0.0, gaps / len(pairs))
        found += [(b.routed_s - mean, mean) for _, b in pairs]
    return found


def _replayed_mean(ready: Sequence[float], work: float) -> float:
    free, total = 0.0, 0.0
    for at in ready:
        free = max(free, at) + work
        total += free - at
    return total / len(ready)
