"""How much work the agent side does around a completion, from when its requests came: `request_cpu_s` and
`request_latency_s` of the `[sim]` section."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import fmean

from sim.clock import to_fs, to_s
from sim.core import Shared
from sim.paths import Path

HALVINGS = 20  # of the interval that holds the work


@dataclass(frozen=True, slots=True)
class Chain:
    """A member's requests, in femtoseconds. Answers came at `completed`; each is followed by `wait`, one of the mean
    length of its tool waits, and by the next request. `known`: the waits are the member's own."""

    submitted: int
    routed: tuple[int, ...]
    completed: tuple[int, ...]
    wait: int
    known: bool


def fit_core(paths: Sequence[Path]) -> tuple[float, float, float]:
    """(request_cpu_s, request_latency_s, mean seconds measured) of the agent side: from ready to routed.

    The work is what makes requests leave a shared processor, when it is given the measured answers, as late in the
    mean as they did. The quickest requests met no other: work and latency are what they took.
    """
    chains = read_chains(paths)
    spans = [span for chain in chains if chain.known for span in _spans(chain)]
    if not spans:
        return 0.0, 0.0, 0.0
    first = min(_spans(chain)[0] for chain in chains)
    later = min((_spans(chain)[1] for chain in chains if chain.known and len(chain.routed) > 1), default=None)
    mean = fmean(spans)
    low, high = 0, round(mean)
    for _ in range(HALVINGS):
        work = (low + high) // 2
        if replayed_mean(chains, work, _latency(work, first, later)) < mean:
            low = work
        else:
            high = work
    return to_s(low), to_s(_latency(low, first, later)), mean * 1e-15


def _latency(work: int, first: int, later: int | None) -> int:
    """What the quickest first and the quickest later request leave for it: half the work comes before the one, all of
    it before the other."""
    return max(0, min(first - work // 2, first if later is None else later - work))


def read_chains(paths: Sequence[Path]) -> list[Chain]:
    """Members whose first request is known. The waits of one that has not ended are taken to be of the others' mean."""
    whole = [p for p in paths if p.asks and p.asks[0].turn == 0]
    waits = {id(p): wait for p in whole if (wait := _mean_wait(p)) is not None}
    mean = fmean(waits.values()) if waits else 0.0
    return [
        Chain(
            to_fs(p.submitted_s),
            tuple(to_fs(ask.routed_s) for ask in p.asks),
            tuple(to_fs(ask.completed_s) for ask in p.asks),
            to_fs(waits.get(id(p), mean)),
            id(p) in waits or len(p.asks) == 1,
        )
        for p in whole
    ]


def replayed_mean(chains: Sequence[Chain], work: int, latency: int) -> float:
    """Mean femtoseconds from ready to routed of the chains whose waits are known, on a shared processor with `work`
    around each completion, were their answers to come when they did."""
    shared, jobs = Shared(work // 2), deque[tuple[int, int, bool]]()
    coming = [(chain.submitted, i, 0, True) for i, chain in enumerate(chains)]
    coming += [(at, i, turn, False) for i, chain in enumerate(chains) for turn, at in enumerate(chain.completed)]
    heapify(coming)
    total = count = 0
    while coming or jobs:
        due = shared.due()
        if due is None or (coming and coming[0][0] < due):
            at, i, turn, asks = heappop(coming)
            shared.add(at)
            jobs.append((i, turn, asks))
            continue
        shared.take()
        i, turn, asks = jobs.popleft()
        chain = chains[i]
        if asks and chain.known:
            total += due + latency - (chain.completed[turn - 1] + chain.wait if turn else chain.submitted)
            count += 1
        elif not asks and turn + 1 < len(chain.routed):
            heappush(coming, (due + chain.wait, i, turn + 1, True))
    return total / count


def _spans(chain: Chain) -> list[int]:
    """From ready to routed, of each request: for later ones all the same, since waits are."""
    later = [b - a - chain.wait for a, b in zip(chain.completed, chain.routed[1:], strict=False)]
    mean = round(fmean(later)) if later else 0
    return [chain.routed[0] - chain.submitted, *(mean for _ in later)]


def _mean_wait(path: Path) -> float | None:
    """Seconds of one of its tool waits; None where its requests are not known to the last."""
    if not path.survived or path.done is None or path.asks[-1].turn + 1 != len(path.asks):
        return None
    return path.done.tool_wait_s / (len(path.asks) - 1) if len(path.asks) > 1 else 0.0
