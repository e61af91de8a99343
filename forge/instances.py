"""What routers see of the rollout instances, folded from events: half of `forge.views`, and all that a pure serving
simulation needs.

Some of it the router's own side knows at once, because requests pass through it: what is in flight where, and how far.
The rest instances report, a while ago: their load, and which prefixes they hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forge.prefix_index import PrefixIndex

#: (chain, blocks) pairs, see `forge.prefix_index`; () where nobody knows.
Path = Sequence[tuple[int, int]]


@dataclass(slots=True)
class InstanceView:
    """One rollout instance. Known here: requests sent and not yet completed, the weights version it serves, prompt
    tokens sent and not yet answered with a first token (those expected to be cached left out). Reported: requests
    that run and wait there, tokens of KV free or evictable."""

    instance: int
    in_flight: int = 0
    version: int = 0
    prefill_tokens: int = 0
    running: int = 0
    waiting: int = 0
    free_tokens: int = 0


@dataclass(slots=True)
class RouterView:
    """For the router: one request to place. `instances` are the live ones, by id, as they are now: they go on changing,
    so a router reads them and keeps none. `cached`: leading tokens of the prompt that an instance is known to hold;
    instances that hold none are left out."""

    now: float
    draw: float
    trajectory: str
    turn: int
    prompt_tokens: int
    instances: tuple[InstanceView, ...]
    cached: dict[int, int] = field(default_factory=dict)

    def least_missing(self) -> list[int]:
        """Who has the fewest prompt tokens to compute before this request's first one; of those, the fewest requests in
        flight."""
        least, fewest, ties, cached = 1 << 62, 0, [0], self.cached
        for seen in self.instances:
            missing = seen.prefill_tokens - cached.get(seen.instance, 0)
            if missing < least or (missing == least and seen.in_flight < fewest):
                least, fewest, ties = missing, seen.in_flight, [seen.instance]
            elif missing == least and seen.in_flight == fewest:
                ties.append(seen.instance)
        return ties


class Instances:
    """State of all instances. `block`: tokens of the KV blocks that paths count."""

    def __init__(self, count: int, block: int = 1) -> None:
        self._all = [InstanceView(i) for i in range(count)]
        self._live = [True] * count
        self._views = tuple(self._all)  # of the live ones
        self._requests: dict[str, tuple[InstanceView, int]] = {}  # where, prompt tokens without a first token
        self.index = PrefixIndex()
        self.block = block

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def is_live(self, instance: int) -> bool:
        return 0 <= instance < len(self._all) and self._live[instance]

    def views(self) -> tuple[InstanceView, ...]:
        """Of the live ones, by id."""
        return self._views

    def _set_live(self, instance: int, live: bool) -> None:
        self._live[instance] = live
        self._views = tuple([state for state in self._all if self._live[state.instance]])

    def cached(self, path: Path) -> dict[int, int]:
        """Leading tokens of a path by instance."""
        return self.index.match(path, self.block)

    # --- what happens ------

    def routed(self, request: str, instance: int, prompt_tokens: int, cached: int = 0) -> None:
        state = self._all[instance]
        missing = prompt_tokens - cached
        state.in_flight += 1
        state.prefill_tokens += missing
        self._requests[request] = state, missing

    def first_token(self, request: str) -> None:
        state, missing = self._requests[request]
        if missing:
            state.prefill_tokens -= missing
            self._requests[request] = state, 0

    def completed(self, request: str) -> bool:
        """False: no such request is in flight."""
        found = self._requests.pop(request, None)
        if found is None:
            return False
        state, missing = found
        state.in_flight -= 1
        state.prefill_tokens -= missing
        return True

    def loaded(self, instance: int, version: int) -> None:
        """What it held is of other weights; nobody may count on it."""
        self._all[instance].version = version
        self.index.clear(instance)

    def down(self, instance: int) -> None:
        """Its requests complete as lost, before or after this."""
        self._set_live(instance, False)
        self.index.clear(instance)

    def up(self, instance: int, version: int) -> None:
        self._set_live(instance, True)
        self.loaded(instance, version)

    def reported(
        self, instance: int, running: int, waiting: int, free_tokens: int, chains: Iterable[tuple[int, int]]
    ) -> None:
        """`chains`: those whose stored blocks changed since the last report, with the blocks they have now."""
        state = self._all[instance]
        state.running, state.waiting, state.free_tokens = running, waiting, free_tokens
        put = self.index.set
        for chain, blocks in chains:
            put(instance, chain, blocks)
