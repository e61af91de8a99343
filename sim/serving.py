"""Mean TTFT and TPOT of an engine under a closed loop, from the cost of its iterations.

`c` requests of `isl` prompt and `osl` output tokens are always in flight. In steady state, per request:

    ahead = burst (c - 1) + convoy (c - 1) / (c - 1 + convoy), at most c - 1
    TPOT = D + interference (c - 1 - ahead) P / osl
    TTFT = request_s + (waits + isl / chunk) D + P (1 + ahead + queue u / (1 - u + 1/c))

D: a decode iteration of the whole batch. P: what a prompt's prefill adds to one. Each of the other c - 1 requests
prefills once while a request is under way: `ahead` of them before its first token, the rest between its tokens. A load
generator that sends everything at once makes a `burst`; requests of one length that started together end together, and
their successors wait in a `convoy`. u: the share of time spent on prefill. Where the KV of all does not fit, as many
run as do on average, and the others wait their turn before. Arrays: one entry a point.
The convoy, the queue and the others' prefill being conserved are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from forge.cost import Deployment, Efficiencies, Work, seconds, work
from forge.cost.operators import Number

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the engine's loop, its front end and the load generator add to the cost of iterations.

    `decode` and `prefill` scale D and P: what is special to one model on one backend. `chunk` in tokens of prefill an
    iteration, `waits` in iterations, `request_s` in seconds (HTTP, tokenisation, first answer).
    """

    decode: Number = 1.0
    prefill: Number = 1.0
    request_s: Number = 0.05
    burst: Number = 0.05
    convoy: Number = 1.0
    queue: Number = 0.5
    waits: Number = 1.0
    chunk: Number = 8192.0
    interference: Number = 1.0


@dataclass(frozen=True)
class Points:
    """Operating points as arrays [n]: the loads, a decode iteration's work, and one that prefills a prompt besides.

    `concurrency` counts the requests that run; for each of them `waiting` others wait for memory.
    """

    concurrency: Array
    waiting: Array
    isl: Array
    osl: Array
    decoding: Work
    mixed: Work

    @classmethod
    def of(cls, loads: Sequence[tuple[Deployment, int, int, int]]) -> Points:
        """Of (deployment, concurrency, isl, osl) each. A sequence's mean context is its prompt and half its output."""
        running, decoding, mixed = [], [], []
        for on, c, isl, osl in loads:
            context = isl + osl / 2
            rows = max(1.0, min(c, on.kv_tokens / context))
            running.append(rows)
            decoding.append(work(on, rows, rows * context))
            mixed.append(work(on, rows, rows * context, [(isl, 0)]))
        asked, prompts, outputs = (np.array([load[i] for load in loads], dtype=float) for i in (1, 2, 3))
        fit = np.array(running)
        return cls(fit, asked / fit - 1.0, prompts, outputs, _stack(decoding), _stack(mixed))


def ttft_tpot(points: Points, by: Efficiencies, serving: Serving) -> tuple[Array, Array]:
    """Seconds, [n] each."""
    s, others = serving, points.concurrency - 1.0
    decode = seconds(points.decoding, by)
    added = (seconds(points.mixed, by) - decode) * s.prefill
    decode = decode * s.decode
    ahead = np.minimum(s.burst * others + s.convoy * others / (others + s.convoy), others)
    tpot = decode + s.interference * (others - ahead) * added / points.osl
    busy = np.minimum(others * added / (points.osl * tpot), 1.0)
    queue = s.queue * busy / (1.0 - busy + 1.0 / points.concurrency)
    ttft = s.request_s + (s.waits + points.isl / s.chunk) * decode + added * (1.0 + ahead + queue)
    return np.asarray(ttft + points.waiting * (ttft + points.osl * tpot)), np.asarray(tpot)


def _stack(works: Sequence[Work]) -> Work:
    return Work(**{f.name: np.array([getattr(one, f.name) for one in works], dtype=float) for f in fields(Work)})
