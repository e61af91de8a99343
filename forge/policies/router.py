"""Routers: which rollout instance serves a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from forge.instances import RouterView
from forge.policies.scheduler import FORBID


class Router(Protocol):
    """Contract: returns the id of one of `view.instances`, which is never empty."""

    def route(self, view: RouterView) -> int: ...


@dataclass(kw_only=True)
class RoundRobin:
    """Each request to the next instance, whatever its load."""

    __pydantic_config__ = FORBID
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
    kind: Literal["least_loaded"] = "least_loaded"

    def route(self, view: RouterView) -> int:
        least = min(i.in_flight for i in view.instances)
        ties = [i.instance for i in view.instances if i.in_flight == least]
        return ties[int(view.draw * len(ties))]


@dataclass(kw_only=True)
class Random:
    """Any instance."""

    __pydantic_config__ = FORBID
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
    kind: Literal["cache_aware"] = "cache_aware"

    def route(self, view: RouterView) -> int:
        cached = view.cached
        best, ties = (1 << 62, 0), [0]
        for seen in view.instances:
            instance, in_flight, _, prefill, _, _, _ = seen
            score = prefill - cached.get(instance, 0), in_flight
            if score < best:
                best, ties = score, [instance]
            elif score == best:
                ties.append(instance)
        return ties[int(view.draw * len(ties))]
