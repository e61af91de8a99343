"""verl's fully asynchronous loop: seconds of a step against the staleness that is allowed, by a small simulation.

A rollouter answers prompts, `samples` responses each, and a trainer takes them as they are done: `require * mini`
prompts for an update, `trigger` updates for a parameter synchronisation. Between two of those the rollouter may hold at
most `(1 + staleness) * trigger * require * mini` prompts, those left from before among them (the quota of verl's
`fully_async_rollouter.py`); a server runs `PROMPTS_A_SERVER` of them at a time. A synchronisation interrupts what is
under way; it goes on afterwards, once its prompt and all it has sampled are prefilled again under the new weights.
Without staleness nothing is under way then. A step is one synchronisation's worth of prompts.

Assumed: servers are loaded alike, so that all sequences advance at one speed, which the cost model gives for the mean
batch; lengths are a log-normal body with a capped heavy tail, half of their log variance
shared by a prompt's responses; every prompt has the same number of tokens; an update takes what was measured.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from forge.cost import CostModel

Array = NDArray[np.float64]

PROMPTS_A_SERVER = 16  # verl's `max_concurrent_samples` a server
PROMPT_TOKENS = 200  # of a competition problem with its instruction
SIGMA, SHARE = 1.0, 0.5  # of log lengths, and of their variance what responses to one prompt share
TAIL_FROM = 4.0  # medians: where the heavy tail, even in the logarithm, begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of a response: log-normal around `median`, or with probability `tail` log-uniform up to `cap`."""

    median: float
    tail: float
    cap: int = 28 * 1024

    def draw(self, rng: np.random.Generator, prompts: int, samples: int) -> Array:
        """[prompts, samples]. The same draws for any median and tail, so that a fit is smooth in both."""
        own, shared = rng.normal(size=(prompts, samples)), rng.normal(size=(prompts, 1))
        which, where = rng.random((2, prompts, samples))
        body = self.median * np.exp(SIGMA * (SHARE**0.5 * shared + (1 - SHARE) ** 0.5 * own))
        first = min(TAIL_FROM * self.median, self.cap)
        tail = first * (self.cap / first) ** where
        capped: Array = np.minimum(np.where(which < self.tail, tail, body), self.cap)
        return capped


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """`servers` of one cost model, all times `slow`; an iteration prefills `budget` tokens at most."""

    cost: CostModel
    servers: int
    slow: float = 1.0
    budget: int = 30 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """verl's `async_training` section and the trainer's seconds: `update_s` of a step's updates together, `other_s` of
    the synchronisation and all else in which nobody works."""

    staleness: float
    update_s: float
    other_s: float
    mini: int = 32
    require: int = 4
    trigger: int = 4
    samples: int = 16

    @property
    def batch(self) -> int:
        """Prompts of an update."""
        return self.require * self.mini

    @property
    def quota(self) -> int:
        return int((1 + self.staleness) * self.trigger * self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Means over steps: seconds, of which the trainer waited `gen_s`; prompts that a synchronisation interrupted; and
    `stall_s` in which servers computed their prefixes again."""

    step_s: float
    gen_s: float
    interrupted: float
    stall_s: float


@dataclass
class _Rollouter:
    """Sequences that advance together. `clock` counts the tokens one has sampled since the start of time: a response of
    L tokens that begins at clock c ends at c + L. `ends`: (end, prompt, begin)."""

    engines: Engines
    now: float = 0.0
    clock: float = 0.0
    stall_s: float = 0.0
    begins: float = 0.0
    done: int = 0
    ends: list[tuple[float, int, float]] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def submit(self, lengths: Array) -> None:
        number = next(self.numbers)
        self.left[number] = len(lengths)
        self.begins += self.clock * len(lengths)
        for tokens in lengths.tolist():
            heapq.heappush(self.ends, (self.clock + tokens, number, self.clock))

    def advance(self, until: float = np.inf) -> bool:
        """To the next end of a response, or to the second `until`; False where that came first."""
        if not self.ends:
            self.now = until
            return False
        stalled = min(self.stall_s, until - self.now)
        self.stall_s -= stalled
        self.now += stalled
        end, number, begin = self.ends[0]
        token_s = self._token_s()
        if self.now + (end - self.clock) * token_s > until:
            self.clock += (until - self.now) / token_s
            self.now = until
            return False
        heapq.heappop(self.ends)
        self.now += (end - self.clock) * token_s
        self.clock, self.begins = end, self.begins - begin
        self.left[number] -= 1
        if not self.left[number]:
            del self.left[number]
            self.done += 1
        return True

    def _token_s(self) -> float:
        """Of an iteration on a server with its share of the sequences and of what they hold."""
        of, active = self.engines, len(self.ends)
        context = active * (self.clock + PROMPT_TOKENS) - self.begins
        a, b = of.cost.line(-(-active // of.servers))
        return of.slow * (a + b * context / of.servers)

    def interrupt(self) -> float:
        """Seconds in which every server prefills its share of all that is under way, from now on."""
        of, seconds = self.engines, 0.0
        chunk: list[tuple[int, int]] = []
        for tokens in [PROMPT_TOKENS + int(self.clock - begin) for _, _, begin in self.ends]:
            if chunk and sum(new for new, _ in chunk) + tokens > of.budget:
                seconds += of.cost.iteration(prefill=chunk)
                chunk = []
            chunk.append((tokens, 0))
        seconds += of.cost.iteration(prefill=chunk) if chunk else 0.0
        self.stall_s = of.slow * seconds / of.servers
        return self.stall_s


def asynchronous(loop: Loop, engines: Engines, lengths: Lengths, steps: int = 12, warm: int = 3, seed: int = 0) -> Step:
    """Means over `steps` steps after `warm` more. A loop without staleness has no memory: its steps are alike."""
    if not loop.staleness:
        steps, warm = 2, 0
    rollouter = _Rollouter(engines)
    total = (steps + warm) * loop.trigger * loop.batch + loop.quota
    prompts = iter(lengths.draw(np.random.default_rng(seed), total, loop.samples))
    told = [_step(loop, rollouter, prompts) for _ in range(warm + steps)][warm:]
    step_s, gen_s, interrupted, stall_s = np.mean(told, axis=0).tolist()
    return Step(step_s=step_s, gen_s=gen_s, interrupted=interrupted, stall_s=stall_s)


def _step(loop: Loop, rollouter: _Rollouter, prompts: Iterator[Array]) -> tuple[float, float, float, float]:
    began, gen_s = rollouter.now, 0.0
    held = len(rollouter.left) + rollouter.done
    most = PROMPTS_A_SERVER * rollouter.engines.servers

    def run(enough: Callable[[], bool], until: float = np.inf) -> None:
        nonlocal held
        while not enough():
            while len(rollouter.left) < most and held < loop.quota:
                rollouter.submit(next(prompts))
                held += 1
            if not rollouter.advance(until):
                return

    for _ in range(loop.trigger):
        asked = rollouter.now
        run(lambda: rollouter.done >= loop.batch)
        gen_s += rollouter.now - asked
        rollouter.done -= loop.batch
        run(lambda: False, rollouter.now + loop.update_s / loop.trigger)
    rollouter.now += loop.other_s
    return rollouter.now - began, gen_s, len(rollouter.left), rollouter.interrupt()


def synchronous(engines: Engines, lengths: Lengths, prompts: int, samples: int, seed: int = 0) -> float:
    """Seconds of a rollout that begins with all prompts and ends with the last response."""
    rollouter = _Rollouter(engines)
    for one in lengths.draw(np.random.default_rng(seed), prompts, samples):
        rollouter.submit(one)
    while rollouter.ends:
        rollouter.advance()
    return rollouter.now
