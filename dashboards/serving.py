"""A recorded workload served by simulated instances under a router: what the page on traces computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from dashboards.comparison import Figure
from dashboards.controls import Changes
from dashboards.frames import BINS, Frame
from forge.cost import CostModel, Deployment, hardware, model_card
from forge.metrics.stats import percentiles
from forge.policies import Router, Seconds
from forge.types import ForgeError
from sim.clock import to_s
from sim.engine import Instance, Shape
from sim.iteration import RooflineTimes
from sim.serve import Loop, Row, Serving
from sim.sessions import Session, Trace
from sim.traces.reading import Recorded
from sim.tunable import kinds_of

REQUESTS = 2000  # served of a trace that has more, unless told otherwise
LONGEST_S = 30.0  # of real time, after which serving is given up


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal instances of `model` on `tp` devices. `budget`: tokens an iteration. `speed`: recorded arrivals come so
    many times as fast; `concurrency` sessions under way at a time instead, where it is not 0. Instances report every
    `period_s` seconds, and routers know as much later."""

    model: str = "llama_3_1_70b"
    hardware: str = "h100_sxm"
    tp: int = 8
    instances: int = 8
    budget: int = 2048
    speed: float = 1.0
    concurrency: int = 0
    period_s: float = 1.0

    def deployment(self) -> Deployment:
        return Deployment(model=model_card(self.model), hardware=hardware(self.hardware), tp=self.tp)


@dataclass(frozen=True, slots=True)
class Served:
    """A run. `seconds`: real ones that it took."""

    rows: list[Row]
    instances: int
    seconds: float


class _TookTooLongError(Exception):
    pass


def cut(trace: Trace, requests: int) -> tuple[Recorded, str]:
    """The first sessions, together of at most so many requests, and a sentence where that is not the whole trace."""
    kept: list[Session] = []
    left, total = requests, 0
    for session in trace.sessions():
        total += len(session.steps)
        if left > 0:
            kept.append(replace(session, steps=session.steps[:left]))
            left -= len(kept[-1].steps)
    some = Recorded(trace.block, tuple(kept))
    if total <= requests:
        return some, ""
    return some, f"Served are the first {requests:,} of {total:,} requests."


def router(kind: str, values: Changes) -> Router:
    """A router with these values of its fields, by their names. Raises ForgeError for what it refuses."""
    if kind not in kinds_of("router"):
        raise ForgeError(f"router = {kind!r}: must be one of {', '.join(kinds_of('router'))}")
    made: Router = kinds_of("router")[kind](**values)
    return made


def defaults(kind: str, fleet: Fleet) -> Changes:
    """Of the fields whose defaults are the deployment's."""
    if kind != Seconds.__dataclass_fields__["kind"].default:
        return {}
    of = Seconds.of(_cost(fleet.model, fleet.hardware, fleet.tp), budget=fleet.budget)
    return {"token_s": float(f"{of.token_s:.3g}"), "pair_s": float(f"{of.pair_s:.3g}")}


@cache
def _cost(model: str, on: str, tp: int) -> CostModel:
    return CostModel(Fleet(model=model, hardware=on, tp=tp).deployment())


def serve(trace: Recorded, fleet: Fleet, policy: Router, longest_s: float = LONGEST_S) -> Served:
    """Raises ForgeError where a model or a prompt does not fit, or it takes longer than a page should."""
    began = time.monotonic()
    cost = _cost(fleet.model, fleet.hardware, fleet.tp)
    capacity = int(cost.on.kv_tokens) // trace.block
    _check_room(trace, fleet, capacity * trace.block)
    shape = Shape(block=trace.block, capacity=capacity, budget=fleet.budget)
    machines = [Instance(RooflineTimes(cost), shape, listen=True) for _ in range(fleet.instances)]
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        if len(rows) % 64 == 0 and time.monotonic() - began > longest_s:
            raise _TookTooLongError

    loop, late = Loop(concurrency=fleet.concurrency or None), fleet.period_s
    if not fleet.concurrency:
        trace = Recorded(trace.block, tuple(replace(s, start_s=s.start_s / fleet.speed) for s in trace.recorded))
    try:
        Serving(trace, machines, policy, loop=loop, on_row=on_row, period_s=late, delay_s=late).run()
    except _TookTooLongError:
        raise ForgeError(
            f"given up after {longest_s:g} s with {len(rows):,} requests answered: lower the number of requests"
        ) from None
    return Served(rows, fleet.instances, time.monotonic() - began)


def _check_room(trace: Recorded, fleet: Fleet, tokens: int) -> None:
    most = max(step.prompt + step.output for session in trace.recorded for step in session.steps)
    if tokens < most:
        room = f"{tokens:,} tokens of KV" if tokens > 0 else "no room for KV"
        raise ForgeError(
            f"{fleet.model} on {fleet.tp} {fleet.hardware} leaves {room}, and a request of this trace has {most:,} "
            f"tokens; use more devices, or a smaller model"
        )


# --- what comes of it ------


def values(rows: Sequence[Row], key: str) -> list[float]:
    """`ttft_s` or `tpot_s` of those that have it: an answer of one token has no time between tokens."""
    return [getattr(row, key) for row in rows if key == "ttft_s" or row.output > 1]


def figures(served: Served) -> dict[str, float]:
    """Seconds, shares and rates; `imbalance`: prompt tokens of the busiest instance over the mean."""
    rows = served.rows
    ends = [to_s(row.ended) for row in rows]
    waits = percentiles(values(rows, "ttft_s")) or {}
    paces = percentiles(values(rows, "tpot_s")) or {"p50": 0.0, "p99": 0.0}
    load = [0] * served.instances
    for row in rows:
        load[row.instance] += row.prompt - row.hit
    mean_load = sum(load) / len(load)
    return {
        "ttft_mean": float(np.mean([row.ttft_s for row in rows])),
        "ttft_p50": waits["p50"],
        "ttft_p99": waits["p99"],
        "tpot_p50": paces["p50"],
        "tpot_p99": paces["p99"],
        "e2e_mean": float(np.mean([to_s(row.ended - row.arrived) for row in rows])),
        "requests_per_s": len(rows) / max(1e-9, max(ends) - min(to_s(row.arrived) for row in rows)),
        "hit": sum(row.hit for row in rows) / sum(row.prompt for row in rows),
        "imbalance": max(load) / mean_load if mean_load else 1.0,
        "preemptions": float(sum(row.preemptions for row in rows)),
    }


FIGURES = tuple(
    Figure(key=key, label=label, unit=unit, more=more, group=group)
    for key, label, unit, more, group in (
        ("ttft_mean", "Time to first token, mean", "s", False, "Latency"),
        ("ttft_p50", "Time to first token, median", "s", False, "Latency"),
        ("ttft_p99", "Time to first token, p99", "s", False, "Latency"),
        ("tpot_p50", "Time per output token, median", "s", False, "Latency"),
        ("tpot_p99", "Time per output token, p99", "s", False, "Latency"),
        ("e2e_mean", "Whole request, mean", "s", False, "Latency"),
        ("requests_per_s", "Requests answered", "1/s", True, "Work"),
        ("hit", "Prompt tokens found cached", "share", True, "Work"),
        ("imbalance", "Tokens computed by the busiest instance, over the mean", "", False, "Work"),
        ("preemptions", "Requests put back", "", False, "Work"),
    )
)


def loads(served: Served) -> Frame:
    """Requests under way at every instance between equal times."""
    rows, count = served.rows, served.instances
    end = max(to_s(row.ended) for row in rows)
    edges = np.linspace(0.0, end or 1.0, BINS + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    found = np.zeros((count, BINS))
    for i in range(count):
        mine = [row for row in rows if row.instance == i]
        starts = np.sort([to_s(row.arrived) for row in mine])
        ends = np.sort([to_s(row.ended) for row in mine])
        found[i] = np.searchsorted(starts, middle, "right") - np.searchsorted(ends, middle, "right")
    return Frame(
        {
            "instance": np.repeat(np.arange(count), BINS),
            "start": np.tile(edges[:-1], count),
            "end": np.tile(edges[1:], count),
            "requests": found.ravel(),
        }
    )


def hits(rows: Sequence[Row]) -> Frame:
    """The share of prompt tokens that were found cached, by when their requests came."""
    times = np.array([to_s(row.arrived) for row in rows])
    edges = np.linspace(0.0, float(times.max()) or 1.0, BINS // 2 + 1)
    sent, _ = np.histogram(times, edges, weights=[float(row.prompt) for row in rows])
    held, _ = np.histogram(times, edges, weights=[float(row.hit) for row in rows])
    some = sent > 0
    return Frame({"t": edges[:-1][some], "share": held[some] / sent[some]})
