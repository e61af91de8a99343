"""Routers: which rollout instance serves a request. Here what one is, and the simple ones; `router_published` has those
of others, `router_seconds` ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, runtime_checkable

from forge.instances import RouterView
from forge.policies.scheduler import FORBID


class Router(Protocol):
    """Contract: returns the id of one of `view.instances`, which is never empty. `reads_load`: the choice depends on
    what instances report of their load (running, waiting, free_tokens, ...), which need not be reported otherwise."""

    reads_load: ClassVar[bool]

    def route(self, view: RouterView) -> int: ...


@runtime_checkable
class Fetching(Router, Protocol):
    """Contract, for worlds that move KV between instances: before the request begins at `instance`, which `route` just
    chose from the same view, the prefix it lacks there is fetched from the instance `source`; None: from nowhere."""

    def source(self, view: RouterView, instance: int) -> int | None: ...


def drawn(ties: list[int], draw: float) -> int:
    """One of several, all as likely: routers that share a view do not herd."""
    return ties[int(draw * len(ties))]


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
    """Fewest requests in flight; of equal ones, one by the draw."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["least_loaded"] = "least_loaded"

    def route(self, view: RouterView) -> int:
        return drawn(least_loaded(view), view.draw)


def least_loaded(view: RouterView) -> list[int]:
    """Those with the fewest requests in flight."""
    least = min([i.in_flight for i in view.instances])
    return [i.instance for i in view.instances if i.in_flight == least]


@dataclass(kw_only=True)
class Random:
    """Any instance."""

    __pydantic_config__ = FORBID
    reads_load: ClassVar[bool] = False
    kind: Literal["random"] = "random"

    def route(self, view: RouterView) -> int:
        return view.instances[int(view.draw * len(view.instances))].instance
