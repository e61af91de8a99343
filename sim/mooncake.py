"""The simulator against Mooncake's published figures (Qin et al., FAST '25; arXiv 2407.00079).

Hit rate of one LRU cache by its size, and mean TTFT of a pool of prefill instances by routing policy, both on the
published conversation trace. `reports/mooncake.py` runs them and says what the publication tells and what it leaves
open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import log
from statistics import fmean, quantiles

from forge.cost import CostModel, Deployment, hardware, model_card
from forge.policies.router import LeastLoaded, Random, Router
from forge.policies.router_published import CacheAware, KvCentric
from forge.types import ForgeError
from sim.clock import to_s
from sim.engine import Instance, Shape
from sim.fetch import Fabric
from sim.iteration import RooflineTimes, SlowTimes
from sim.kv import ChainCache
from sim.serve import Serving
from sim.sessions import Session, Step, Trace

#: Mean TTFT in seconds on 16 nodes of 8xA800, the conversation trace replayed (figure 5 of FAST '25).
PUBLISHED_TTFT_S = {"random": 19.65, "least_loaded": 5.27, "cache_aware": 3.58, "kv_centric": 3.07}
#: Share of the hit rate of an endless cache that one of 3 million tokens reaches (figure 9, conversation).
PUBLISHED_HIT_SHARE = {3e6: 0.41}
#: Times the published value; what the goal allows.
TOLERANCE = 0.25
POLICIES = tuple(PUBLISHED_TTFT_S)


# --- hit rate ------


def hit_rate(trace: Trace, tokens: float | None) -> float:
    """Share of prompt tokens found in one LRU cache of so many tokens, requests in order of arrival, each served at
    once; None: an endless one. The block of a prompt's last token is always computed, as in an engine."""
    cache, block = ChainCache(), trace.block
    capacity = None if tokens is None else int(tokens // block)
    hits = prompts = 0
    for step in steps(trace):
        prompts += step.prompt
        hits += block * min(cache.match(step.path), (step.prompt - 1) // block)
        held = cache.hold(step.path)
        for entry, (_, blocks) in zip(held, step.path, strict=True):
            cache.store(entry, blocks)
        cache.release(held)
        if capacity is not None and cache.stored > capacity:
            cache.evict(cache.stored - capacity)
    return hits / prompts


def steps(trace: Trace) -> Iterator[Step]:
    for session in trace.sessions():
        yield from session.steps


# --- TTFT ------


@dataclass(frozen=True)
class Prefills:
    """A trace as a prefill pool sees it: every answer is its first token. Arrivals come `speed` times as fast.

    `spread`: sessions that start at one time come evenly until the next start. The published trace has one start in
    three seconds. Not `cached`: nobody hits anything.
    """

    trace: Trace
    speed: float = 1.0
    cached: bool = True
    spread: bool = False

    @property
    def block(self) -> int:
        return self.trace.block

    def sessions(self) -> Iterator[Session]:
        for session in spread(self.trace.sessions()) if self.spread else self.trace.sessions():
            made = tuple(
                replace(step, output=1, keep=False, path=step.path if self.cached else ()) for step in session.steps
            )
            yield replace(session, start_s=session.start_s / self.speed, steps=made)


def spread(sessions: Iterator[Session]) -> Iterator[Session]:
    """Sessions of one start come evenly until the next; the last ones in the time that the ones before had."""
    groups = [(start, list(group)) for start, group in groupby(sessions, lambda session: session.start_s)]
    gap_s = 0.0
    for i, (start, group) in enumerate(groups):
        if i + 1 < len(groups):
            gap_s = groups[i + 1][0] - start
        for j, session in enumerate(group):
            yield replace(session, start_s=start + gap_s * j / len(group))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A prefill pool. Defaults are what the publication tells, or, where it is silent, ours.

    `instances` of 8xA800, tensor parallel. `cache_tokens` of KV each. `speed`: of arrivals. `budget`: prompt tokens an
    iteration. `bandwidth`: bytes/s that an instance sends to others. `threshold`: of `kv_centric`. `slowness`: factor
    on all iterations. `period_s`: how often instances report (0: routers see the present). `cached`, `spread`: see
    `Prefills`.
    """

    instances: int = 8
    cache_tokens: float = 3e6
    speed: float = 1.0
    budget: int = 8192
    bandwidth: float = 87e9
    threshold: float = 1.0
    slowness: float = 1.0
    period_s: float = 0.0
    cached: bool = True
    spread: bool = False

    def __post_init__(self) -> None:
        for name in ("instances", "cache_tokens", "speed", "bandwidth", "slowness"):
            if getattr(self, name) <= 0:
                raise ForgeError(f"{name} = {getattr(self, name):g}: must be positive")

    @cached_property
    def cost(self) -> CostModel:
        return CostModel(Deployment(model=model_card("llama_3_1_70b"), hardware=hardware("a800_sxm"), tp=8))

    @property
    def transfer_token_s(self) -> float:
        """Seconds of a token's KV between two instances."""
        on = self.cost.on
        return on.kv_bytes * on.devices / self.bandwidth

    def token_s(self, trace: Trace) -> float:
        """Seconds of a prompt token, on average over the trace: what routers reckon with."""
        prompts = [step.prompt for step in steps(trace)]
        return self.slowness * sum(self.cost.prefill(tokens) for tokens in prompts) / sum(prompts)

    def router(self, policy: str, trace: Trace) -> Router:
        plain: Mapping[str, type[Random | LeastLoaded | CacheAware]] = {
            "random": Random,
            "least_loaded": LeastLoaded,
            "cache_aware": CacheAware,
        }
        if policy in plain:
            return plain[policy]()
        if policy != "kv_centric":
            raise ForgeError(f"policy = {policy!r}: must be one of {', '.join(POLICIES)}")
        return KvCentric(token_s=self.token_s(trace), transfer_token_s=self.transfer_token_s, threshold=self.threshold)

    def pool(self, block: int) -> list[Instance]:
        times = SlowTimes(RooflineTimes(self.cost), self.slowness)
        shape = Shape(block=block, capacity=int(self.cache_tokens // block), budget=self.budget)
        return [Instance(times, shape, listen=True) for _ in range(self.instances)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run, or the mean of several. Seconds; shares of prompt tokens (`hit`, `fetched` from another instance);
    `busy`: share of the pool's time until the last arrival's end; `gpu_s`: seconds of all its iterations. `low_s`,
    `high_s`: the least and the greatest mean TTFT of the runs."""

    ttft_s: float
    p50_s: float
    p90_s: float
    hit: float
    fetched: float
    busy: float
    gpu_s: float
    low_s: float
    high_s: float


def serve(trace: Trace, setup: Setup, policy: str, seed: int = 0) -> Outcome:
    """TTFT counts from arrival: queue, fetch and prefill."""
    seen = Prefills(trace, setup.speed, setup.cached, setup.spread)
    pool = setup.pool(trace.block)
    world = Serving(
        seen,
        pool,
        setup.router(policy, trace),
        period_s=setup.period_s,
        seed=seed,
        fabric=Fabric(block_s=trace.block * setup.transfer_token_s),
    )
    rows = world.run()
    waits = [row.ttft_s for row in rows]
    tokens = sum(row.prompt for row in rows)
    gpu_s = sum(to_s(instance.usage(world.env.now).busy_fs) for instance in pool)
    deciles = quantiles(waits, n=10) if len(waits) > 1 else waits * 9
    return Outcome(
        ttft_s=fmean(waits),
        p50_s=deciles[4],
        p90_s=deciles[8],
        hit=sum(row.hit for row in rows) / tokens,
        fetched=world.fetched_blocks * trace.block / tokens,
        busy=gpu_s / len(pool) / to_s(max(row.ended for row in rows)),
        gpu_s=gpu_s,
        low_s=fmean(waits),
        high_s=fmean(waits),
    )


def over_seeds(trace: Trace, setup: Setup, policy: str, seeds: Sequence[int]) -> Outcome:
    """Means over seeds."""
    runs = [serve(trace, setup, policy, seed) for seed in seeds]
    means = {name: fmean(getattr(run, name) for run in runs) for name in Outcome.__dataclass_fields__}
    means["low_s"] = min(run.ttft_s for run in runs)
    means["high_s"] = max(run.ttft_s for run in runs)
    return Outcome(**means)


# --- against the publication ------


def errors(ttft_s: Mapping[str, float]) -> dict[str, float]:
    """Relative error of the mean TTFT of each policy that was published."""
    return {policy: ttft_s[policy] / published - 1.0 for policy, published in PUBLISHED_TTFT_S.items()}


def within(ttft_s: Mapping[str, float]) -> bool:
    """All four are."""
    return all(abs(error) <= TOLERANCE for error in errors(ttft_s).values())


def closest(by_speed: Mapping[float, Mapping[str, float]]) -> float:
    """The speed whose worst of the four is nearest to the publication, by the logarithm of the ratio."""
    return min(by_speed, key=lambda speed: max(abs(log(1.0 + error)) for error in errors(by_speed[speed]).values()))
