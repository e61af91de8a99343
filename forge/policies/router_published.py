"""Routers of other systems, written anew from their formulas, with their published defaults.

What a formula wants is taken from the router's own side where theirs is (requests in flight, prompts without a first
token), and from reports where theirs is. Prefixes are what instances tell that they hold. Equal scores are settled by
the draw, unless the original says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal
from zlib import crc32

from forge.instances import InstanceView, RouterView
from forge.policies.router import drawn, least_loaded
from forge.policies.scheduler import FORBID
from forge.types import ForgeError


def least(view: RouterView, score: Callable[[InstanceView], float]) -> int:
    """The instance of the least score; of equal ones, one by the draw."""
    best, ties = float("inf"), [view.instances[0].instance]
    for seen in view.instances:
        found = score(seen)
        if found < best:
            best, ties = found, [seen.instance]
        elif found == best:
            ties.append(seen.instance)
    return drawn(ties, view.draw)


def longest(view: RouterView) -> tuple[int, list[int]]:
    """Tokens of the longest prefix that a live instance is known to hold, and who holds it."""
    held = [view.cached.get(seen.instance, 0) for seen in view.instances]
    most = max(held)
    return most, [seen.instance for seen, tokens in zip(view.instances, held, strict=True) if tokens == most]


def within(name: str, value: float, low: float, high: float = float("inf")) -> None:
    if not low <= value <= high:
        bounds = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        raise ForgeError(f"{name} = {value:g}: must be {bounds}")


@dataclass(kw_only=True)
class CacheAware:
    """Fewest prompt tokens to compute before this request's first token: those sent there and unanswered, and what of
    this prompt is not cached there. On equal instances that is the least queue and prefill time, as Mooncake's local
    cache-aware scheduling estimates it (T_queue + T_prefill, arXiv 2407.00079). Equal ones: fewest in flight, then by
    the draw."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["cache_aware"] = "cache_aware"

    def route(self, view: RouterView) -> int:
        return drawn(view.least_missing(), view.draw)


@dataclass(kw_only=True)
class KvCentric:
    """Mooncake's global cache-aware scheduling (algorithm 1 of arXiv 2407.00079 and FAST '25): the instance with the
    least T_queue + T_prefill of what is cached there, or, where the longest prefix anywhere is more than `threshold`
    times as long as the one there, T_transfer + T_queue + T_prefill with that prefix fetched. What is fetched stays, so
    hot prefixes spread. Equal ones: fewest in flight, then by the draw.

    Seconds of a token are the deployment's: `token_s` to compute it in a prompt, `transfer_token_s` to fetch its KV.
    `threshold` is at least 1; the publication tunes its own by hand and does not tell it. A world that moves no KV
    (`Fetching`) makes the estimates too hopeful: there this is no choice of `policy.router`.
    """

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["kv_centric"] = "kv_centric"
    token_s: float = 1.6e-4
    transfer_token_s: float = 3.8e-6
    threshold: float = 1.0

    def __post_init__(self) -> None:
        if self.token_s <= 0 or self.transfer_token_s < 0:
            raise ForgeError(
                f"token_s, transfer_token_s = {self.token_s:g}, {self.transfer_token_s:g}: must be seconds, the first "
                "positive"
            )
        within("threshold", self.threshold, 1.0)

    def route(self, view: RouterView) -> int:
        cached = view.cached
        most = max(cached.values(), default=0)
        best, ties = (float("inf"), 0), [0]
        for seen in view.instances:
            here = cached.get(seen.instance, 0)
            seconds = (seen.prefill_tokens + view.prompt_tokens - here) * self.token_s
            if most > self.threshold * here:
                seconds += (most - here) * (self.transfer_token_s - self.token_s)
            score = seconds, seen.in_flight
            if score < best:
                best, ties = score, [seen.instance]
            elif score == best:
                ties.append(seen.instance)
        return drawn(ties, view.draw)

    def source(self, view: RouterView, instance: int) -> int | None:
        """Of those that hold the longest prefix, one by the draw: they share the sending."""
        most = max(view.cached.values(), default=0)
        if most <= self.threshold * view.cached.get(instance, 0):
            return None
        return drawn(sorted(i for i, tokens in view.cached.items() if tokens == most), view.draw)


@dataclass(kw_only=True)
class Sglang:
    """SGLang's `cache_aware`: where the loads differ by more than `balance_abs` requests and the greatest is more than
    `balance_rel` times the least, the least load; else the longest prefix, where it is more than `match` of the prompt;
    else the least load. Loads are the router's own requests in flight.

    Source: sgl-router, `--balance-abs-threshold 32 --balance-rel-threshold 1.1 --cache-threshold 0.5`. Its tree holds
    what it sent, ours what instances tell; its else-branch first took the smallest tree, now the least load.
    """

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["sglang"] = "sglang"
    balance_abs: int = 32
    balance_rel: float = 1.1
    match: float = 0.5

    def __post_init__(self) -> None:
        within("balance_abs", self.balance_abs, 0)
        within("balance_rel", self.balance_rel, 1.0)
        within("match", self.match, 0.0, 1.0)

    def route(self, view: RouterView) -> int:
        loads = [seen.in_flight for seen in view.instances]
        low, high = min(loads), max(loads)
        if not (high - low > self.balance_abs and high > self.balance_rel * low):
            most, holders = longest(view)
            if most > self.match * view.prompt_tokens:
                return drawn(holders, view.draw)
        return drawn(least_loaded(view), view.draw)


@dataclass(kw_only=True)
class Dynamo:
    """NVIDIA Dynamo's KV router at temperature 0: least
    `scale * max(0, (active_prefill + ISL)/block - credit * d * overlap) + decode_blocks + active_weight * active`, with
    `d = 1/(1 + decay * excess/ISL)`, excess being the active prefill tokens above the least-loaded instance's. The
    active ones are the router's own; decode_blocks are the prompt blocks of its requests in flight.

    Source: ai-dynamo, lib/kv-router, `KvRouterConfig::default()`: scale 1, credit 1, decay 0, active_weight 0; `block`
    is its default of 16 tokens. Credits for host and disk copies (0.75, 0.25) have nothing to count here.
    """

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["dynamo"] = "dynamo"
    scale: float = 1.0
    credit: float = 1.0
    decay: float = 0.0
    active_weight: float = 0.0
    block: int = 16

    def __post_init__(self) -> None:
        within("scale", self.scale, 0.0)
        within("credit", self.credit, 0.0, 1.0)
        within("decay", self.decay, 0.0)
        within("active_weight", self.active_weight, 0.0)
        within("block", self.block, 1)

    def route(self, view: RouterView) -> int:
        lowest = min([seen.prefill_tokens for seen in view.instances])
        return least(view, lambda seen: self.cost(view, seen, lowest))

    def cost(self, view: RouterView, seen: InstanceView, lowest: int) -> float:
        """In blocks. `lowest`: of the active prefill tokens of all."""
        decay = 1.0 / (1.0 + self.decay * (seen.prefill_tokens - lowest) / view.prompt_tokens)
        raw = (seen.prefill_tokens + view.prompt_tokens) / self.block
        overlap = self.credit * decay * view.cached.get(seen.instance, 0) / self.block
        decode = seen.context_tokens / self.block
        return self.scale * max(0.0, raw - overlap) + decode + self.active_weight * seen.in_flight


@dataclass(kw_only=True)
class Llmd:
    """llm-d's endpoint picker: greatest weighted sum of scores in [0, 1]: the share of the prompt that is cached
    (`prefix`), how short the queue is between the shortest and the longest (`queue`), the share of KV that is free
    (`kv`). Queue and KV are as reported.

    Source: gateway-api-inference-extension's prefix-cache, queue and kv-cache-utilization scorers with the
    max-score picker; weights 3:2:2 since llm-d 0.3, 1:1:1 before.
    """

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = True
    kind: Literal["llmd"] = "llmd"
    prefix: float = 3.0
    queue: float = 2.0
    kv: float = 2.0

    def __post_init__(self) -> None:
        within("prefix", self.prefix, 0.0)
        within("queue", self.queue, 0.0)
        within("kv", self.kv, 0.0)

    def route(self, view: RouterView) -> int:
        waiting = [seen.waiting for seen in view.instances]
        shortest, span = min(waiting), max(waiting) - min(waiting)

        def score(seen: InstanceView) -> float:
            cached = min(1.0, view.cached.get(seen.instance, 0) / view.prompt_tokens)
            short = 1.0 - (seen.waiting - shortest) / span if span else 1.0
            free = seen.free_tokens / seen.capacity_tokens if seen.capacity_tokens else 1.0
            return self.prefix * cached + self.queue * short + self.kv * free

        return least(view, lambda seen: -score(seen))


@dataclass(kw_only=True)
class VllmDp:
    """vLLM's load balancing over data-parallel engines: least `4 * waiting + running`, as reported; what a router sends
    counts as `clients` more waiting until the engine reports again, one for each router in parallel.

    Source: vllm/v1/engine/core_client.py, `DPLBAsyncMPClient.get_core_engine_for_request`; counts come every 100 ms.
    Its engines are tried from another start by every client; here the draw settles equal scores.
    """

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = True
    kind: Literal["vllm_dp"] = "vllm_dp"
    waiting_weight: int = 4
    clients: int = 1
    #: by instance: the report that counts were added to, and how many
    _added: dict[int, tuple[float, int]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        within("waiting_weight", self.waiting_weight, 0)
        within("clients", self.clients, 1)

    def route(self, view: RouterView) -> int:
        chosen = least(view, lambda seen: self.waiting_weight * self._waiting(seen) + seen.running)
        seen = next(seen for seen in view.instances if seen.instance == chosen)
        self._added[chosen] = seen.reported_s, self._waiting(seen) - seen.waiting + self.clients
        return chosen

    def _waiting(self, seen: InstanceView) -> int:
        reported_s, added = self._added.get(seen.instance, (seen.reported_s, 0))
        return seen.waiting + (added if reported_s == seen.reported_s else 0)


@dataclass(kw_only=True)
class PrefixAffinity:
    """The longest prefix that is known, whatever the load; where nobody is known to hold any, the session's home: the
    instance that a hash of both puts first (rendezvous hashing), so that an instance that comes or goes moves nobody
    else's sessions. What consistent-hash gateways and sticky sessions do."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["prefix_affinity"] = "prefix_affinity"

    def route(self, view: RouterView) -> int:
        most, holders = longest(view)
        if most:
            return drawn(holders, view.draw)
        return max((crc32(f"{view.trajectory}@{i.instance}".encode()), i.instance) for i in view.instances)[1]
