"""What routers see of the rollout instances, folded from events: half of `forge.views`, and all that a pure serving
simulation needs.

Some of it the router's own side knows at once, because requests pass through it: what is in flight where, and how far.
The rest instances report, a while ago: their load, and which prefixes they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge.prefix_index import PrefixIndex

#: (chain, blocks) pairs, see `forge.prefix_index`; () where nobody knows.
Path = Sequence[tuple[int, int]]

NOTHING: Mapping[int, int] = {}  # cached anywhere


class InstanceView(NamedTuple):
    """One rollout instance. Known here: requests sent and not yet completed, the weights version it serves, prompt
    tokens sent and not yet answered with a first token (those expected to be cached left out). Reported: requests
    that run and wait there, tokens of KV free or evictable."""

    instance: int
    in_flight: int
    version: int
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0


class RouterView(NamedTuple):
    """For the router: one request to place. `instances` are the live ones, by id. `cached`: leading tokens of the
    prompt that an instance is known to hold; instances that hold none are left out."""

    now: float
    draw: float
    trajectory: str
    turn: int
    prompt_tokens: int
    instances: tuple[InstanceView, ...]
    cached: Mapping[int, int] = NOTHING


@dataclass(slots=True)
class _Instance:
    instance: int
    in_flight: int = 0
    version: int = 0
    live: bool = True
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0

    def view(self) -> InstanceView:
        return InstanceView(
            self.instance,
            self.in_flight,
            self.version,
            self.prefill_tokens,
            self.running,
            self.waiting,
            self.free_tokens,
        )


class Instances:
    """State of all instances. `block`: tokens of the KV blocks that paths count."""

    def __init__(self, count: int, block: int = 1) -> None:
        self._all = {i: _Instance(i) for i in range(count)}
        self._requests: dict[str, tuple[_Instance, int]] = {}  # request -> where, prompt tokens without a first token
        self._views = [state.view() for state in self._all.values()]  # of the live ones
        self._places = list(range(count))  # in `_views`, by instance; -1: not live
        self._changed: set[int] = set()  # whose view is out of date
        self.index = PrefixIndex()
        self.block = block

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def is_live(self, instance: int) -> bool:
        return instance in self._all and self._all[instance].live

    def views(self) -> tuple[InstanceView, ...]:
        """Of the live ones, by id."""
        if self._changed:
            for instance in self._changed:
                if (place := self._places[instance]) >= 0:
                    self._views[place] = self._all[instance].view()
            self._changed.clear()
        return tuple(self._views)

    def _arrange(self) -> None:
        """Somebody came or went."""
        live = [state for state in self._all.values() if state.live]
        self._views = [state.view() for state in live]
        self._places = [-1] * len(self._all)
        for place, state in enumerate(live):
            self._places[state.instance] = place

    def cached(self, path: Path) -> dict[int, int]:
        """Leading tokens of a path by instance."""
        return self.index.match(path, self.block)

    # --- what happens ------

    def routed(self, request: str, instance: int, prompt_tokens: int, cached: int = 0) -> None:
        state = self._all[instance]
        missing = prompt_tokens - cached
        state.in_flight += 1
        state.prefill_tokens += missing
        self._changed.add(instance)
        self._requests[request] = state, missing

    def first_token(self, request: str) -> None:
        state, missing = self._requests[request]
        if missing:
            state.prefill_tokens -= missing
            self._changed.add(state.instance)
            self._requests[request] = state, 0

    def completed(self, request: str) -> bool:
        """False: no such request is in flight."""
        found = self._requests.pop(request, None)
        if found is None:
            return False
        state, missing = found
        state.in_flight -= 1
        state.prefill_tokens -= missing
        self._changed.add(state.instance)
        return True

    def loaded(self, instance: int, version: int) -> None:
        """What it held is of other weights; nobody may count on it."""
        self._all[instance].version = version
        self._changed.add(instance)
        self.index.clear(instance)

    def down(self, instance: int) -> None:
        """Its requests complete as lost, before or after this."""
        self._all[instance].live = False
        self._arrange()
        self.index.clear(instance)

    def up(self, instance: int, version: int) -> None:
        self._all[instance].live = True
        self.loaded(instance, version)
        self._arrange()

    def reported(
        self, instance: int, running: int, waiting: int, free_tokens: int, chains: Iterable[tuple[int, int]]
    ) -> None:
        """`chains`: those whose stored blocks changed since the last report, with the blocks they have now."""
        state = self._all[instance]
        state.running, state.waiting, state.free_tokens = running, waiting, free_tokens
        self._changed.add(instance)
        put = self.index.set
        for chain, blocks in chains:
            put(instance, chain, blocks)
