"""What routers are compared on (`forge bench routing`): two recorded workloads on one fleet, at a share of what it can
do, by one router or several in parallel, with signals that are late.

The fleet is 8 instances of llama_3_1_70b on 8 h100_sxm each, between which KV moves at the 87 GB/s an instance that
Mooncake measured: the one world in which all of the policies can do what they are made for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, quantiles

from forge.cost import CostModel, Deployment, hardware, model_card
from forge.policies import CacheAware, Dynamo, LeastLoaded, Llmd, PrefixAffinity, Router, Seconds, Sglang, VllmDp
from forge.policies.router_published import KvCentric
from sim.clock import to_s
from sim.engine import Instance, Shape
from sim.fetch import Fabric
from sim.iteration import RooflineTimes
from sim.serve import Loop, Row, Serving
from sim.sessions import Trace
from sim.traces import claude_code, mooncake
from sim.traces.reading import Recorded

INSTANCES, BUDGET, BANDWIDTH = 8, 2048, 87e9
OURS = "seconds"
FILES = {
    "claude_code": ("claude_code_traces/requests.csv", "callanjfox/kv-cache-tester, reduced to lengths and prefixes"),
    "mooncake": (
        "mooncake/conversation_trace.jsonl",
        "kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl",
    ),
}
THINK_CAP_S = 120.0  # of a wait between two requests of a session: longer ones are a human's
SATURATING = 20.0  # times the recorded speed: far more than the fleet can do
CONCURRENCIES = (8, 12, 16, 24, 32, 48, 64, 96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of a workload one run is. `keep`: share of Mooncake's conversations; `sessions` of Claude Code's, and
    how many `requests` of each at most."""

    keep: float = 0.25
    sessions: int = 70
    requests: int = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`load`: share of the greatest throughput of `least_loaded`. `routers` in parallel. Reports are made every
    `signal_s` and reach the routers as late."""

    workload: str
    load: float
    routers: int
    signal_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast work comes: `speed` of recorded arrivals (open loop), or sessions under way at a time (closed loop)."""

    speed: float = 1.0
    concurrency: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run. Seconds; requests a second in the middle half of the answers; the share of prompt tokens hit."""

    ttft_s: float
    p99_s: float
    requests_per_s: float
    hit: float
    requests: int


# --- workloads ------


def load(workload: str, data: Path) -> Trace:
    path = data / FILES[workload][0]
    return mooncake.load(path) if workload == "mooncake" else claude_code.load(path, think_cap_s=THINK_CAP_S)


def part(workload: str, trace: Trace, seed: int, size: Size, pace: Pace) -> Recorded:
    """A seed's own part of a trace. Mooncake: each conversation, that is requests that begin with the same two chains,
    with probability `size.keep`, at the times recorded. Claude Code: `size.sessions` of the sessions, in a drawn order,
    each to its first `size.requests` requests."""
    rng, sessions = Random(seed), list(trace.sessions())
    if workload == "claude_code":
        chosen = rng.sample(sessions, min(size.sessions, len(sessions)))
        cut = (replace(one, start_s=0.0, steps=one.steps[: size.requests]) for one in chosen)
        return Recorded(trace.block, tuple(cut))
    kept: dict[object, bool] = {}
    found = []
    for one in sessions:
        path = one.steps[0].path
        conversation = path[min(1, len(path) - 1)][0] if path else one.name
        if conversation not in kept:
            kept[conversation] = rng.random() < size.keep
        if kept[conversation]:
            found.append(replace(one, start_s=one.start_s / pace.speed))
    return Recorded(trace.block, tuple(found))


# --- routers ------


@cache
def cost() -> CostModel:
    return CostModel(Deployment(model=model_card("llama_3_1_70b"), hardware=hardware("h100_sxm"), tp=8))


def transfer_token_s() -> float:
    """Seconds of a token's KV between two instances."""
    on = cost().on
    return on.kv_bytes * on.devices / BANDWIDTH


def token_s(trace: Trace) -> float:
    """Seconds of a prompt token, on average over the trace: what `kv_centric` reckons with."""
    prompts = [step.prompt for session in trace.sessions() for step in session.steps]
    return sum(cost().prefill(tokens) for tokens in prompts) / sum(prompts)


def routers(trace: Trace, count: int) -> Mapping[str, Callable[[], Router]]:
    """Makes one of `count` in parallel, by name; all with their defaults, and what is the deployment's."""
    mean_s = token_s(trace)
    return {
        "least_loaded": LeastLoaded,
        "cache_aware": CacheAware,
        "kv_centric": lambda: KvCentric(token_s=mean_s, transfer_token_s=transfer_token_s()),
        "sglang": Sglang,
        "dynamo": Dynamo,
        "llmd": Llmd,
        "vllm_dp": lambda: VllmDp(clients=count),
        "prefix_affinity": PrefixAffinity,
        OURS: lambda: Seconds.of(cost(), budget=BUDGET, bandwidth=BANDWIDTH),
    }


NAMES = (
    "least_loaded",
    "cache_aware",
    "kv_centric",
    "sglang",
    "dynamo",
    "llmd",
    "vllm_dp",
    "prefix_affinity",
    OURS,
)


# --- a run ------


def serve(trace: Recorded, made: Sequence[Router], pace: Pace, signal_s: float, seed: int) -> Outcome:
    """TTFT counts from arrival: queue, fetch and prefill."""
    on = cost().on
    shape = Shape(block=trace.block, capacity=int(on.kv_tokens) // trace.block, budget=BUDGET)
    fleet = [Instance(RooflineTimes(cost()), shape, listen=True) for _ in range(INSTANCES)]
    world = Serving(
        trace,
        fleet,
        made[0],
        beside=made[1:],
        loop=Loop(concurrency=pace.concurrency),
        period_s=signal_s,
        delay_s=signal_s,
        seed=seed,
        fabric=Fabric(block_s=trace.block * transfer_token_s()),
    )
    return _outcome(world.run())


def _outcome(rows: Sequence[Row]) -> Outcome:
    waits = [row.ttft_s for row in rows]
    ends = sorted(row.ended for row in rows)
    low, high = len(rows) // 4, 3 * len(rows) // 4
    return Outcome(
        ttft_s=fmean(waits),
        p99_s=quantiles(waits, n=100)[98],
        requests_per_s=(high - low) / to_s(ends[high] - ends[low]),
        hit=sum(row.hit for row in rows) / sum(row.prompt for row in rows),
        requests=len(rows),
    )


# --- loads ------


def paces(
    workload: str, trace: Trace, loads: Sequence[float], size: Size, seed: int
) -> tuple[float, dict[float, Pace]]:
    """The greatest throughput (requests/s) of one `least_loaded` router, and the pace of each load. Open loop: arrivals
    as many times as fast as bring their mean rate there. Closed loop: the concurrency at which `least_loaded` has that
    throughput, between those of `CONCURRENCIES` by the logarithm."""

    def rate(pace: Pace) -> float:
        some = part(workload, trace, seed, size, pace)
        return serve(some, [LeastLoaded()], pace, 0.1, seed).requests_per_s

    if workload == "mooncake":
        most = rate(Pace(speed=SATURATING))
        recorded = part(workload, trace, seed, size, Pace()).recorded
        natural = len(recorded) / recorded[-1].start_s
        return most, {one: Pace(speed=one * most / natural) for one in loads}
    rates = [rate(Pace(concurrency=n)) for n in CONCURRENCIES]
    return max(rates), {one: Pace(concurrency=_crossing(rates, one * max(rates))) for one in loads}


def _crossing(rates: Sequence[float], wanted: float) -> int:
    """The concurrency at which the rate first is as wanted."""
    after = next(i for i, rate in enumerate(rates) if rate >= wanted)
    if not after:
        return CONCURRENCIES[0]
    low, high = log(CONCURRENCIES[after - 1]), log(CONCURRENCIES[after])
    share = (wanted - rates[after - 1]) / (rates[after] - rates[after - 1])
    return round(exp(low + share * (high - low)))
