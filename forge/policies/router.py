"""Routers: which rollout instance serves a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from forge.instances import RouterView
from forge.policies.scheduler import FORBID
from forge.types import ForgeError


class Router(Protocol):
    """Contract: returns the id of one of `view.instances`, which is never empty. `reads_load`: the choice depends on
    what instances report of their load (running, waiting, free_tokens), which need not be reported otherwise."""

    reads_load: ClassVar[bool]

    def route(self, view: RouterView) -> int: ...


@runtime_checkable
class Fetching(Router, Protocol):
    """Contract, for worlds that move KV between instances: before the request begins at `instance`, which `route` just
    chose from the same view, the prefix it lacks there is fetched from the instance `source`; None: from nowhere."""

    def source(self, view: RouterView, instance: int) -> int | None: ...


@dataclass(kw_only=True)
class RoundRobin:
    """Each request to the next instance, whatever its load."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["round_robin"] = "round_robin"
    _calls: int = field(default=0, init=False, repr=False)

    def route(self, view: RouterView) -> int:
        chosen = view.instances[self._calls % len(view.instances)].instance
        self._calls += 1
        return chosen


@dataclass(kw_only=True)
class LeastLoaded:
    """Fewest requests in flight; ties are broken by the draw, so that routers sharing a view do not herd."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["least_loaded"] = "least_loaded"

    def route(self, view: RouterView) -> int:
        least = min(i.in_flight for i in view.instances)
        ties = [i.instance for i in view.instances if i.in_flight == least]
        return ties[int(view.draw * len(ties))]


@dataclass(kw_only=True)
class Random:
    """Any instance."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["random"] = "random"

    def route(self, view: RouterView) -> int:
        return view.instances[int(view.draw * len(view.instances))].instance


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
        ties = view.least_missing()
        return ties[int(view.draw * len(ties))]


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
        if self.threshold < 1.0:
            raise ForgeError(f"threshold = {self.threshold:g}: must be at least 1")

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
        return ties[int(view.draw * len(ties))]

    def source(self, view: RouterView, instance: int) -> int | None:
        """Of those that hold the longest prefix, one by the draw: they share the sending."""
        most = max(view.cached.values(), default=0)
        if most <= self.threshold * view.cached.get(instance, 0):
            return None
        holders = sorted(i for i, tokens in view.cached.items() if tokens == most)
        return holders[int(view.draw * len(holders))]
