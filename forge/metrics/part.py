"""Figures of a part of a run: rates and shares between two times, under the keys of `summary.json`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from forge import trace as ev

Counters = tuple[float, float, float]  # busy seconds, tokens prefilled, tokens decoded, of all instances


def part_figures(events: Sequence[ev.Event], start_s: float, end_s: float, instances: int) -> dict[str, float]:
    """What happened after `start_s` up to `end_s`; a step counts where it was committed, an item's lag where it was
    taken. Engine counters are read between two usage events on a straight line. Of a run of one life; without the
    figures of what did not happen.
    """
    span = end_s - start_s
    steps = [e for e in events if isinstance(e, ev.Committed) and start_s < e.t <= end_s]
    lags = [e.lag_items for e in events if isinstance(e, ev.Taken) and start_s < e.t <= end_s]
    trained = sum(step.tokens for step in steps)
    figures = {
        "trained_tokens_per_s": trained / span,
        "items_per_s": sum(len(e.positions) for e in steps) / span,
        "trainer_idle_fraction": 1.0 - _trainer_busy(events, start_s, end_s) / span,
    }
    if lags:
        figures |= {"lag_items_mean": sum(lags) / len(lags), "lag_items_max": float(max(lags))}
    usage = [e for e in events if isinstance(e, ev.Usage)]
    if len(usage) > 1:
        before, after = _counters(usage, start_s), _counters(usage, end_s)
        busy, prefilled, decoded = (b - a for a, b in zip(before, after, strict=True))
        figures["throughput_tokens_per_s"] = (prefilled + decoded + trained) / span
        figures["engine_idle_fraction"] = 1.0 - busy / (span * instances)
    return figures


def _trainer_busy(events: Sequence[ev.Event], start_s: float, end_s: float) -> float:
    """Seconds with a batch between its start and its commit."""
    busy, since = 0.0, None
    for event in events:
        if isinstance(event, ev.StepStarted):
            since = event.t
        elif isinstance(event, ev.Committed) and since is not None:
            busy += max(0.0, min(event.t, end_s) - max(since, start_s))
            since = None
    return busy + (max(0.0, end_s - max(since, start_s)) if since is not None else 0.0)


def _counters(usage: Sequence[ev.Usage], at_s: float) -> Counters:
    """On the line between the events around `at_s`; before the first and after the last one, that one's."""
    late = bisect_right([e.t for e in usage], at_s)
    if late in (0, len(usage)):
        return _totals(usage[min(late, len(usage) - 1)])
    a, b = usage[late - 1], usage[late]
    share = (at_s - a.t) / (b.t - a.t)
    busy, prefilled, decoded = (x + share * (y - x) for x, y in zip(_totals(a), _totals(b), strict=True))
    return busy, prefilled, decoded


def _totals(usage: ev.Usage) -> Counters:
    return sum(usage.busy_s), float(sum(usage.prefill_tokens)), float(sum(usage.decode_tokens))
