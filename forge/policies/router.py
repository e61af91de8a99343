"""Routers: which rollout instance serves a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from forge.policies.scheduler import FORBID
from forge.views import RouterView


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
