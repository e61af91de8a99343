"""What is drawn of a run, as columns of numbers: thinned to what a page can show, with a word on what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dashboards.records import Records, in_flight
from forge.metrics.stats import Array, smooth, smoothing_window
from forge.metrics.summary import FEATURES
from forge.report import series

Columns = dict[str, Any]  # sequences of one length by name

SPANS = 1500  # bars of the queue window
DOTS = 1500  # of a scatter
CURVE = 300  # points of a curve
BINS = 80  # of a time axis


@dataclass(frozen=True, slots=True)
class Frame:
    """`columns` to draw. `note`: what was left out, in a sentence; empty: nothing."""

    columns: Columns
    note: str = ""

    def __bool__(self) -> bool:
        return any(len(column) for column in self.columns.values())


def thinned(rows: Sequence[Any], most: int, what: str) -> tuple[list[Any], str]:
    """Evenly spaced ones of them, the first and the last among them; and the word on it."""
    if len(rows) <= most:
        return list(rows), ""
    at = np.unique(np.linspace(0, len(rows) - 1, most).astype(int))
    return [rows[i] for i in at], f"Drawn are {len(at):,} of {len(rows):,} {what}, evenly spaced."


# --- the queue ------


def default_range(records: Records, *, newest: bool) -> tuple[float, float]:
    """Seconds in which about three generation batches were submitted: in the middle of the run, or its last ones."""
    items = list(records.run.items.values())
    if not items:
        return 0.0, records.wall_s
    width = min(len(items), max(24, min(3 * records.scenario.queue.n, 110)))
    low = len(items) - width if newest else (len(items) - width) // 2
    shown = items[low : low + width]
    end = records.wall_s if newest else max(_end_s(one, records.wall_s) for one in shown)
    start = shown[0].submitted_s
    return (start, end) if end > start else (0.0, records.wall_s)


def _end_s(item: Any, otherwise: float) -> float:
    known = [t for t in (item.taken_s, item.dead_s) if t is not None]
    return float(min(known)) if known else otherwise


@dataclass(frozen=True, slots=True)
class QueueWindow:
    """Positions against time: `spans` of items in their states, the window's `edges`, where items were taken and died
    (`marks`)."""

    spans: Frame
    edges: Frame
    marks: Frame


def queue_window(records: Records, start_s: float, end_s: float) -> QueueWindow:
    """Of what happened between two times."""
    run, window = records.run, records.window
    seen = [s for s in series.spans(run, window) if s.start_s < end_s and s.end_s > start_s]
    kept, note = _thinned_positions(seen)
    spans = {
        "position": [s.position for s in kept],
        "state": [s.state for s in kept],
        "start": [max(s.start_s, start_s) for s in kept],
        "end": [min(s.end_s, end_s) for s in kept],
    }
    shown = {s.position for s in kept}
    marks = [
        (t, item.position, what)
        for item in run.items.values()
        if item.position in shown
        for t, what in ((item.taken_s, "taken"), (item.dead_s, "dead"))
        if t is not None and start_s <= t <= end_s
    ]
    grid = np.linspace(start_s, end_s, CURVE)
    head = series.head_at(run, grid)
    edges = {"t": grid, "position": head - 0.5, "edge": ["head"] * CURVE}
    if window is not None:
        edges = {
            "t": np.concatenate([grid, grid]),
            "position": np.concatenate([head - 0.5, head + window - 0.5]),
            "edge": ["head"] * CURVE + ["end of the window"] * CURVE,
        }
    columns = {"t": [m[0] for m in marks], "position": [m[1] for m in marks], "what": [m[2] for m in marks]}
    return QueueWindow(Frame(spans, note), Frame(edges), Frame(columns))


def _thinned_positions(spans: list[series.Span]) -> tuple[list[series.Span], str]:
    """Whole positions are left out, so that every one drawn tells its story."""
    if len(spans) <= SPANS:
        return spans, ""
    every = -(-len(spans) // SPANS)
    positions = len({s.position for s in spans})
    kept = [s for s in spans if s.position % every == 0]
    return kept, f"Drawn is every {every}th of {positions:,} positions; a shorter range of time shows all."


def states(records: Records) -> Frame:
    """How many items are in each state over the whole run."""
    grid = np.linspace(0.0, records.wall_s, CURVE)
    found = series.counts(series.spans(records.run, records.window), grid)
    return Frame(
        {
            "t": np.tile(grid, len(found)),
            "items": np.concatenate(list(found.values())),
            "state": [state for state in found for _ in grid],
        }
    )


def lag(records: Records) -> Frame:
    """Of every item consumed, when it was taken."""
    done = [i for i in records.run.consumed() if i.lag_items is not None and i.taken_s is not None]
    kept, note = thinned(done, DOTS, "items")
    columns = {
        "t": [i.taken_s for i in kept],
        "lag": [i.lag_items for i in kept],
        "position": [i.position for i in kept],
    }
    return Frame(columns, note)


def weights_age(records: Records) -> Frame:
    """How many items were trained on so many trainer steps after the oldest weights that sampled them."""
    ages = [age for i in records.run.consumed() if (age := i.lag_versions) is not None]
    values, counts = np.unique(np.array(ages, dtype=int), return_counts=True)
    return Frame({"age": values, "items": counts})


def mixture(records: Records) -> Frame:
    """Batch means per step of what greed could sort by, with the bounds of 95% of batches under random order."""
    columns: Columns = {"step": [], "mean": [], "feature": [], "low": [], "high": []}
    note = ""
    for name, of in FEATURES.items():
        batches = [[v for i in batch if (v := of(i)) is not None] for batch in records.run.batches()]
        batches = [batch for batch in batches if batch]
        pooled = np.array([v for batch in batches for v in batch])
        if len(pooled) < 2:
            continue
        half = 2.0 * float(pooled.std()) / float(np.sqrt(np.mean([len(b) for b in batches])))
        kept, note = thinned(list(enumerate(batches, 1)), CURVE, "steps")
        centre = float(pooled.mean())
        columns["step"] += [step for step, _ in kept]
        columns["mean"] += [float(np.mean(batch)) for _, batch in kept]
        columns["feature"] += [name.replace("_", " ")] * len(kept)
        columns["low"] += [centre - half] * len(kept)
        columns["high"] += [centre + half] * len(kept)
    return Frame(columns, note)


# --- machines ------


def busy(records: Records) -> Frame:
    """Busy shares of engines and trainer between equal times."""
    run = records.run
    bins = max(8, min(40, len(run.steps) // 3))
    edges = np.linspace(0.0, records.wall_s, bins + 1)
    engine, trainer = series.busy_shares(run, records.scenario.engine.instances, edges)
    named = [("trainer", trainer)] + ([("engines", engine)] if run.usage else [])
    return Frame(
        {
            "t": np.tile(edges, len(named)),
            "busy": np.clip(np.concatenate([[*values, values[-1]] for _, values in named]), 0.0, 1.0),
            "who": [who for who, _ in named for _ in edges],
        }
    )


def instances(records: Records) -> Frame:
    """Of every instance between equal times: the busy share, requests under way on average at both ends."""
    run = records.run
    if not run.instance_usage:
        return Frame({"instance": []})
    count = len(run.instance_usage[0][1])
    bins = max(8, min(BINS, len(run.instance_usage)))
    edges = np.linspace(0.0, records.wall_s, bins + 1)
    shares = np.clip(series.instance_shares(run, edges), 0.0, 1.0)
    under_way = in_flight(records.flights, count, edges)
    columns = {
        "instance": np.repeat(np.arange(count), bins),
        "start": np.tile(edges[:-1], count),
        "end": np.tile(edges[1:], count),
        "busy": shares.ravel(),
        "requests": ((under_way[:, :-1] + under_way[:, 1:]) / 2).ravel(),
    }
    return _most_instances(columns, count, bins)


MOST_INSTANCES = 64


def _most_instances(columns: Columns, count: int, bins: int) -> Frame:
    if count <= MOST_INSTANCES:
        return Frame(columns)
    kept = {name: values[: MOST_INSTANCES * bins] for name, values in columns.items()}
    return Frame(kept, f"Drawn are the first {MOST_INSTANCES} of {count} instances.")


def downs(records: Records) -> Frame:
    """When instances were down."""
    wall_s = records.wall_s
    found = [(i, start, wall_s if end is None else end) for i, start, end in records.flights.downs]
    return Frame({"instance": [d[0] for d in found], "start": [d[1] for d in found], "end": [d[2] for d in found]})


def cached(records: Records) -> Frame:
    """The share of prompt tokens sent that the router believed cached, over time. Empty where none ever was."""
    run = records.run
    if not any(run.prompts[2::3]):
        return Frame({"t": []})
    edges = np.linspace(0.0, records.wall_s, BINS // 2 + 1)
    shares = series.cached_shares(run, edges)
    known = ~np.isnan(shares)
    return Frame({"t": edges[:-1][known], "share": shares[known]})


def tiers(records: Records) -> Frame:
    """Prompt tokens by where they were found. Without tiers: in an instance's KV, or computed."""
    hits, run = records.hits, records.run
    if hits is not None:
        parts = {
            "instance (L1)": hits.l1,
            "host memory (L2)": hits.l2,
            "shared store (L3)": hits.l3,
            "computed": hits.missed,
        }
    elif run.cached_tokens is not None:
        parts = {"instance (L1)": run.cached_tokens, "computed": run.prefill_tokens}
    else:
        return Frame({"tier": []})
    total = sum(parts.values())
    if not total:
        return Frame({"tier": []})
    return Frame({"tier": list(parts), "tokens": list(parts.values()), "share": [n / total for n in parts.values()]})


# --- latencies and learning ------


def distribution(values: Sequence[float] | Array) -> Frame:
    """The share of values at or below each, as a curve."""
    ordered = np.sort(np.maximum(np.asarray(values, dtype=np.float64), 1e-6))
    if not len(ordered):
        return Frame({"seconds": []})
    shown = np.unique(np.linspace(0, len(ordered) - 1, CURVE).astype(int))
    return Frame({"seconds": ordered[shown], "share": (shown + 1) / len(ordered)})


def parts(records: Records) -> Frame:
    """Seconds of each part, summed over instances."""
    known = {name: seconds for name, seconds in records.summary()["parts"].items() if seconds is not None}
    return Frame({"part": list(known), "seconds": list(known.values())})


def reward(records: Records) -> Frame:
    """Mean reward of every step's batch, the moving mean, and held-out scores."""
    curve = records.summary()["reward"]["curve"]
    rewards = [mean for _, _, mean in curve]
    moving = smooth(rewards, smoothing_window(len(rewards))) if rewards else []
    rows = [(t, mean, "batch mean (sampled)") for t, _, mean in curve]
    rows += [(t, mean, "moving mean") for (t, _, _), mean in zip(curve, moving, strict=True)]
    rows, note = thinned(rows, 2 * DOTS, "points")
    rows += [(e.t, e.mean, "held-out tasks") for e in records.run.evaluations]
    return Frame({"t": [r[0] for r in rows], "reward": [r[1] for r in rows], "what": [r[2] for r in rows]}, note)


def side_by_side(frames: dict[str, Frame]) -> Frame:
    """Frames of several runs as one, with a column that names the run."""
    full = {run: frame for run, frame in frames.items() if frame}
    names = list(next(iter(full.values())).columns) if full else []
    columns: Columns = {name: [v for f in full.values() for v in f.columns[name]] for name in names}
    columns["run"] = [run for run, frame in full.items() for _ in next(iter(frame.columns.values()))]
    return Frame(columns, " ".join(dict.fromkeys(frame.note for frame in full.values() if frame.note)))
