"""What `window_sensitivity.py` runs: families of rollouts, the schedulers tried in each, and the figures of one run.

Time here is in minutes of rollout: a typical item takes one. Items are single requests that wait for a tool; the
engine's own time is negligible beside it, so throughput is decided by queue, trainer and order alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from forge import trace as ev
from forge.metrics import summarise
from forge.mix import Mix
from forge.scenario import Scenario, parse
from sim.sessions import Step
from sim.work import Group, MemberWork
from sim.world import simulate

BATCH = 8
MINUTE_S = 60.0
LONGEST = 50.0  # minutes: the longest rollout of any shape
SHAPES = ("light", "log-normal", "heavy tail", "fifty")
MIXES = ("one domain", "short and long")
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, order=True)
class Family:
    """What is given: how long rollouts take, the mix, engine slots C, and the trainer's speed relative to them."""

    shape: str
    mix: str
    concurrency: int
    load: float  # seconds of training over seconds of rollout that C slots take for a batch

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.mix}, C={self.concurrency}, trainer load {self.load:g}"


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """What is chosen: N, and a scheduler. `fraction` of a fixed window; None: the adaptive one under `budget`."""

    n: int
    fraction: float | None
    budget: int
    escape: tuple[int, float, int] = (0, 0.0, 0)  # E, minutes, X

    @property
    def name(self) -> str:
        window = "adaptive" if self.fraction is None else f"{self.fraction:g} N"
        items, minutes, reach = self.escape
        return f"{window}, E={items} after {minutes:g} min, X={reach}" if items else window

    def scheduler(self) -> dict[str, Any]:
        items, minutes, reach = self.escape
        escape = {"park_items": items, "park_after_s": minutes * MINUTE_S, "park_reach": reach}
        if self.fraction is None:
            return {"kind": "adaptive_window", "lag_budget": self.budget, **escape}
        return {"kind": "windowed_fifo", "fraction": max(self.fraction, 1e-9), **escape}


class Rollouts:
    """The work of a family: how long an item is, in minutes and in tokens, is a pure function of seed and position."""

    block = 1

    def __init__(self, family: Family, seed: int) -> None:
        self._family, self._seed = family, seed
        names = ["short", "long"] if family.mix == MIXES[1] else ["only"]
        self._mix = Mix(dict.fromkeys(names, 1.0))
        self._items: dict[tuple[int, str], Group] = {}

    def item(self, position: int, domain: str | None = None) -> Group:
        domain = domain or self._mix.domain(position)
        if (position, domain) not in self._items:
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(position,))))
            minutes = min(LONGEST, SCALE[domain] * _length(self._family.shape, rng))
            tokens = max(1, min(400, round(24 * minutes**0.5)))
            step = Step(prompt=16, output=tokens, delay_s=minutes * MINUTE_S)
            self._items[position, domain] = Group(domain, round(minutes, 3), (MemberWork((step,), 1.0),))
        return self._items[position, domain]


#: of a typical length, by domain
SCALE = {"only": 1.0, "short": 0.3, "long": 1.7}


def _length(shape: str, rng: np.random.Generator) -> float:
    """In typical lengths."""
    match shape:
        case "light":
            return math.exp(0.25 * float(rng.standard_normal()))
        case "log-normal":
            return math.exp(0.9 * float(rng.standard_normal()))
        case "heavy tail":
            return 0.5 * float(rng.pareto(1.3) + 1.0)
        case _:  # one in sixty takes fifty minutes
            return LONGEST if rng.random() < 1 / 60 else math.exp(0.25 * float(rng.standard_normal()))


def scenario(family: Family, candidate: Candidate, seed: int, items: int) -> Scenario:
    lengths = [Rollouts(family, 999).item(p).difficulty for p in range(400)]
    names = ["short", "long"] if family.mix == MIXES[1] else ["only"]
    train_s = family.load * BATCH * MINUTE_S * float(np.mean(lengths)) / family.concurrency
    return parse(
        {
            "name": "window",
            "seed": seed,
            "stop": {"items": items},
            "queue": {
                "n": candidate.n,
                "batch": BATCH,
                "concurrency": family.concurrency,
                "group": 1,
                "item_timeout_s": 1e6,
            },
            "policy": {"scheduler": candidate.scheduler()},
            "domains": [{"name": name} for name in names],
            "engine": {"slots": family.concurrency, "max_context": 1024},
            "sim": {
                "step_s": 0.01,
                "request_cpu_s": 0.0,
                "request_latency_s": 0.0,
                "train_step_s": train_s,
                "train_token_s": 0.0,
            },
        },
        "window",
    )


def run(family: Family, candidate: Candidate, seed: int, items: int, work: Rollouts) -> Figures:
    """Of the time up to the last submission: what comes after is the end of the work, not its pace."""
    given = scenario(family, candidate, seed, items)
    events = simulate(given, work=work).events
    summary = summarise(events, given)
    assert not summary["law_violations"], summary["law_violations"][:3]
    last = max(e.t for e in events if isinstance(e, ev.Submitted))
    steps = [e for e in events if isinstance(e, ev.Committed) and e.t <= last]
    waits = [b - a for a, b in pairwise([0.0, *(e.t for e in steps), last])]
    return {
        "items_per_min": MINUTE_S * sum(len(e.positions) for e in steps) / last,
        "lag_mean": float(summary["lag_items_mean"]),
        "lag_max": float(summary["lag_items_max"]),
        "lag_bound": float(summary["lag_items_bound"]),
        "nonstationarity": float(summary["nonstationarity"]),
        "stall_min": max(waits) / MINUTE_S,
        "parked": float(summary["items_parked"]),
        "stale": float(summary["dead"]["stale"]),
    }
