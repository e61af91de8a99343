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


def cached_shares(events: Sequence[ev.Event]) -> tuple[float, float] | None:
    """Shares of a first and of a later turn's prompt tokens that were not computed; None where no prompt is seen.

    A line through what was computed between two usage events, by the prompt tokens of the requests whose first token
    came meanwhile, then scaled so that all that was computed comes out.
    """
    rows: list[list[float]] = []
    routed: dict[str, ev.Routed] = {}
    asked, last = [0.0, 0.0], 0.0
    for event in events:
        if isinstance(event, ev.Resumed):
            last = 0.0
        elif isinstance(event, ev.Routed):
            routed[event.request] = event
        elif isinstance(event, ev.FirstToken) and (request := routed.pop(event.request, None)) is not None:
            asked[request.turn > 0] += request.prompt_tokens
        elif isinstance(event, ev.Usage):
            computed = float(sum(event.prefill_tokens))
            if sum(asked):
                rows.append([computed - last, *asked])
            asked, last = [0.0, 0.0], computed
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    if not len(table):
        return None
    line = fit_line(table[:, 1:], table[:, 0])
    fitted = float((table[:, 1:] @ np.array(line.coefficients)).sum())
    scale = float(table[:, 0].sum()) / fitted if fitted > 0 else 1.0
    first, later = (min(0.99, max(0.0, 1.0 - scale * share)) for share in line.coefficients)
    return first, later


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
