"""KV tiers under an instance's own: host memory (L2), and a store that all share (L3).

Blocks that an instance evicts go to its L2, what that has no room for to L3. A request whose leading blocks are there
fetches them over the tier's bandwidth, which it shares with others, if that is sooner than computing them; they are
inserted into the instance's cache, and only then it queues. How far fetching pays is decided once, by the cost of the
prompt's rest alone and what the links do at the time. A request whose chain is being fetched for another waits for it.

Blocks are keyed by the weights version that computed them: nothing crosses versions, and while an instance loads
weights it fetches nothing. A fetch of an instance that loads or crashes meanwhile is for nothing. Copies stay where
they were. Writes cost no time. L2 is lost with its instance, L3 is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sim.engine import Instance, Load
from sim.fleet import Fleet, Listener
from sim.iteration import Times
from sim.links import Links, Transfer, Wire
from sim.request import Request
from sim.sessions import Path
from sim.tier_store import Stores


@dataclass(slots=True)
class Hits:
    """Prompt tokens by where they were found on arrival, those of requests with a path; `missed` in none."""

    l1: int = 0
    l2: int = 0
    l3: int = 0
    missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roads:
    """What fetching costs: `links` has a port for each instance's L2, and one more for L3."""

    links: Links
    l2: Wire
    l3: Wire


@dataclass(slots=True, eq=False)
class _Fetch:
    """Blocks of each tier on their way to instance `i`, for `request` (None: it has gone) and those who wait for it."""

    i: int
    version: int
    request: Request | None
    path: Path
    blocks: int  # of the path, that the instance has when all have come
    from_tier: dict[int, int]
    chains: list[int]
    transfers: list[Transfer] = field(default_factory=list)
    left: int = 0
    waiters: list[Request] = field(default_factory=list)


class Tiers:
    """A `sim.front.Inner`. `times` of each instance."""

    def __init__(
        self,
        env: Any,
        instances: Sequence[Instance],
        listener: Listener,
        *,
        stores: Stores,
        roads: Roads,
        times: Sequence[Times],
    ) -> None:
        self._env = env
        self._fleet = Fleet(env, instances, self)
        self._listener = listener
        self._stores = stores
        self._roads = roads
        self._times = times
        self._block = roads.l2.block
        self.instances = instances
        self.hits = Hits()
        self._loading: set[int] = set()
        self._coming: list[dict[int, _Fetch]] = [{} for _ in instances]  # by chain
        self._fetching: dict[Request, _Fetch] = {}  # requests that are not with their instance yet

    # --- a front ------

    def add(self, i: int, request: Request) -> None:
        if request.ready or not request.path or i in self._loading:
            self._fleet.add(i, request)
            return
        for chain, _ in request.path:
            if (under_way := self._coming[i].get(chain)) is not None:
                under_way.waiters.append(request)
                self._fetching[request] = under_way
                return
        self.instances[i].sync(self._env.now)
        self._arrive(i, request)

    def cancel(self, i: int, request: Request) -> bool:
        fetch = self._fetching.pop(request, None)
        if fetch is None:
            return self._fleet.cancel(i, request)
        if fetch.request is request:
            fetch.request = None  # what comes is of use to others
        else:
            fetch.waiters.remove(request)
        return True

    def load(self, i: int, load: Load) -> None:
        self._loading.add(i)
        self._fleet.load(i, load)

    def crash(self, i: int) -> list[Request]:
        self._loading.discard(i)
        self._stores.hosts[i].clear()
        for fetch in dict.fromkeys(self._coming[i].values()):
            for transfer in fetch.transfers:
                self._roads.links.cancel(transfer)
        self._coming[i] = {}
        lost = [request for request, fetch in self._fetching.items() if fetch.i == i]
        for request in lost:
            del self._fetching[request]
        return [*self._fleet.crash(i), *lost]

    def up(self, i: int, version: int) -> None:
        self._fleet.up(i, version)

    def insert(self, i: int, path: Path, blocks: int) -> None:
        self._fleet.insert(i, path, blocks)

    def forget(self, chains: list[int]) -> None:
        self._fleet.forget(chains)
        for i, instance in enumerate(self.instances):
            for chain in chains:
                self._stores.forget(i, (instance.version, chain))

    def let_go(self, i: int, request: Request) -> None:
        self._fleet.let_go(i, request)

    def on_first_token(self, instance: int, request: Request) -> None:
        self._listener.on_first_token(instance, request)

    def on_end(self, instance: int, request: Request) -> None:
        self._listener.on_end(instance, request)

    def on_loaded(self, instance: int, version: int) -> None:
        self._loading.discard(instance)
        self._listener.on_loaded(instance, version)

    # --- a fetch ------

    def _arrive(self, i: int, request: Request) -> None:
        runs = self._runs(i, request)
        cut = self._worth(i, request, runs)
        used = runs[:cut]
        from_tier = {tier: sum(blocks for where, _, blocks in used if where == tier) for tier in (1, 2, 3)}
        if cut == self._own(runs):
            self._count(request, from_tier)
            self._fleet.add(i, request)
            return
        version = self.instances[i].version
        chains = list(dict.fromkeys(chain for where, chain, _ in used if where > 1))
        fetch = _Fetch(i, version, request, request.path, sum(from_tier.values()), from_tier, chains)
        self._fetching[request] = fetch
        for chain in chains:
            self._stores.touch(i, (version, chain))
            self._coming[i][chain] = fetch
        for tier, wire, port in self._ways(i):
            if from_tier[tier]:
                size = wire.size(from_tier[tier] * self._block)
                fetch.left += 1
                links = self._roads.links
                fetch.transfers.append(links.send((port,), size, lambda: self._came(fetch), wire.latency_fs))

    def _ways(self, i: int) -> tuple[tuple[int, Wire, int], tuple[int, Wire, int]]:
        """(tier, what it costs, port) of L2 and L3."""
        return (2, self._roads.l2, i), (3, self._roads.l3, len(self.instances))

    def _runs(self, i: int, request: Request) -> list[tuple[int, int, int]]:
        """The prompt's leading blocks as (tier, chain, blocks) in order, up to the first that is nowhere. The block of
        its last token is computed in any case."""
        cache, version = self.instances[i].cache, self.instances[i].version
        left = (request.prompt - 1) // self._block
        runs = []
        for chain, blocks in request.path:
            want = min(blocks, left)
            at = min(cache.stored_of(chain), want)
            runs.append((1, chain, at))
            while at < want:
                tier, end = self._stores.find(i, (version, chain), at)
                if not tier:
                    return runs
                runs.append((tier, chain, min(end, want) - at))
                at = min(end, want)
            left -= want
        return runs

    @staticmethod
    def _own(runs: list[tuple[int, int, int]]) -> int:
        """How many runs are the instance's own before the first that is not."""
        return next((k for k, (tier, _, _) in enumerate(runs) if tier > 1), len(runs))

    def _worth(self, i: int, request: Request, runs: list[tuple[int, int, int]]) -> int:
        """How many of the runs to have, so that the prompt is done soonest."""
        own = self._own(runs)
        if own == len(runs):
            return own
        links, block = self._roads.links, self._block
        best, soonest = own, -1
        for cut in range(own, len(runs) + 1):
            fetch = 0
            for tier, wire, port in self._ways(i):
                if blocks := sum(blocks for where, _, blocks in runs[:cut] if where == tier):
                    fetch = max(fetch, wire.latency_fs + links.estimate((port,), wire.size(blocks * block)))
            found = block * sum(blocks for _, _, blocks in runs[:cut])
            total = fetch + self._times[i].mixed(0, 0, [(request.prompt - found, found)])
            if soonest < 0 or total < soonest:
                best, soonest = cut, total
        return best

    def _came(self, fetch: _Fetch) -> None:
        """One tier's part is here; with the last, those who wait for it go on."""
        fetch.left -= 1
        if fetch.left:
            return
        i = fetch.i
        for chain in fetch.chains:
            del self._coming[i][chain]
        instance = self.instances[i]
        if i not in self._loading and instance.version == fetch.version:
            self._fleet.insert(i, fetch.path, fetch.blocks)
        if fetch.request is not None:
            del self._fetching[fetch.request]
            here = instance.cache.match(fetch.path) >= fetch.blocks
            self._count(fetch.request, fetch.from_tier if here else fetch.from_tier | {2: 0, 3: 0})
            self._fleet.add(i, fetch.request)
        for request in fetch.waiters:
            del self._fetching[request]
        for request in fetch.waiters:
            self.add(i, request)

    def _count(self, request: Request, found: dict[int, int]) -> None:
        hits, block = self.hits, self._block
        hits.l1 += found[1] * block
        hits.l2 += found[2] * block
        hits.l3 += found[3] * block
        hits.missed += request.prompt - sum(found.values()) * block
