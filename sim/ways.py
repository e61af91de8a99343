"""Which instance computes a prompt, and which decodes its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from forge.policies.placement import Placement, PlacementView
from sim.engine import Instance
from sim.flight import Flight, Source
from sim.request import Request

Role = Literal["prefill", "decode"]


class Ways:
    """Of a cluster: what its instances have to do, and the choice between them. `block`: tokens of a KV block.

    `sources`: the prefill instances, by id. `bound`: requests that a decode instance has, or that are bound for it.
    `to_compute`: tokens of the prompts that a decode instance computes, until their first token.
    """

    def __init__(
        self, env: Any, instances: Sequence[Instance], roles: Sequence[Role], placement: Placement, block: int
    ) -> None:
        self._env = env
        self._all = instances
        self._roles = roles
        self._placement = placement
        self._block = block
        self.live = [True] * len(roles)
        self.sources: dict[int, Source] = {}
        self.bound = [0] * len(roles)
        self.to_compute = [0] * len(roles)

    def way(self, i: int, request: Request) -> tuple[int, int]:
        """Who computes the prompt (-1: who decodes), and who decodes (-1: chosen when the prompt is done), of a request
        that was sent to `i`."""
        decodes = i not in self.sources
        target = i if decodes else self.least()
        source = self._soonest(request) if decodes else i
        if source >= 0 and target >= 0 and not self._placement.apart(self._view(request, target, source)):
            return -1, target
        return (source, i) if decodes else (i, -1)

    def least(self) -> int:
        """The live decode instance with the fewest bound for it; -1 without one."""
        live = [i for i, role in enumerate(self._roles) if role == "decode" and self.live[i]]
        return min(live, key=lambda i: self.bound[i], default=-1)

    def missing(self, i: int, request: Request) -> int:
        """Prompt tokens that the instance would compute: the last one always."""
        return max(1, request.prompt - self.held(i, request) * self._block)

    def held(self, i: int, request: Request) -> int:
        """Leading blocks of the prompt that the instance has."""
        self._all[i].sync(self._env.now)
        return self._all[i].cache.match(request.path)

    def bind(self, flight: Flight, target: int) -> None:
        flight.target = target
        if target >= 0:
            self.bound[target] += 1

    def unbind(self, flight: Flight) -> None:
        self.computed_here(flight)
        if flight.target >= 0:
            self.bound[flight.target] -= 1

    def compute_here(self, flight: Flight) -> None:
        """The decode instance is to compute the prompt."""
        flight.tokens = self.missing(flight.target, flight.request)
        self.to_compute[flight.target] += flight.tokens

    def computed_here(self, flight: Flight) -> None:
        """The decode instance has no more of its prompt to compute."""
        if flight.source < 0:
            self.to_compute[flight.target] -= flight.tokens
            flight.tokens = 0

    def _soonest(self, request: Request) -> int:
        """The live prefill instance with the fewest prompt tokens to compute, this request's included; -1 without."""
        live = [i for i in self.sources if self.live[i]]
        return min(live, key=lambda i: self.sources[i].tokens + self.missing(i, request), default=-1)

    def _view(self, request: Request, target: int, source: int) -> PlacementView:
        return PlacementView(
            prompt_tokens=request.prompt,
            missing_here=self.missing(target, request),
            waiting_here=self.to_compute[target],
            decoding=self._all[target].running,
            missing_there=self.missing(source, request),
            waiting_there=self.sources[source].tokens,
        )
