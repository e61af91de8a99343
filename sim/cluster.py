"""Prefill and decode on different instances, with KV that crosses a network between them.

An instance of role `decode` samples answers, and computes prompts too where asked. One of role `prefill` computes
prompts for others: as a request of one token, whose KV it holds until all of it has crossed. A request sent to a decode
instance has its prompt computed by the prefill instance with the least to compute, and comes back; one sent to a
prefill instance goes on to the decode instance with the least in flight. Which prompts go apart a policy says; while no
prefill instance lives all are computed where they are decoded.

What the decode instance has of the prompt does not cross. A transfer begins when the prompt is done (no layer is sent
ahead), and a request waits with its KV beside the decode instance's memory until there is room.

KV is of the weights that computed it. Where the decode instance serves others by then, the request keeps its KV for
itself and shares none, as one that runs through an update; under `abort` it computes it anew.

A crash loses the requests that the instance computes or decodes, those whose KV leaves it and those bound for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge.policies.placement import Placement
from forge.policies.sync import SyncMode
from sim.engine import Instance, Load
from sim.fleet import Listener
from sim.flight import Flight, Source
from sim.front import Inner
from sim.links import Links, Wire
from sim.request import Request
from sim.sessions import Path
from sim.ways import Role, Ways


class Cluster:
    """A `sim.front.Front`. `inner` makes the fleet of all instances, a role for each; the first `front` are those that
    requests are sent to. `links` has a port for each instance: its network cards."""

    def __init__(
        self,
        env: Any,
        inner: Callable[[Any, Listener], Inner],
        listener: Listener,
        *,
        roles: Sequence[Role],
        front: int,
        links: Links,
        wire: Wire,
        placement: Placement,
    ) -> None:
        self._env = env
        self._inner = inner(env, self)
        self._listener = listener
        self._all = self._inner.instances
        self.instances: Sequence[Instance] = self._all[:front]
        self._links = links
        self._wire = wire
        self._ways = Ways(env, self._all, roles, placement, wire.block)
        self._flights: dict[Request, Flight] = {}  # by the request that was sent, in order of arrival
        self._sources = self._ways.sources
        self._sources |= {i: self._source(i) for i, role in enumerate(roles) if role == "prefill"}
        self._modes: list[SyncMode] = ["in_flight"] * len(roles)  # of the newest load
        self._loading: set[int] = set()
        self._stranded: list[Flight] = []  # no decode instance lives

    @property
    def inner(self) -> Inner:
        """The fleet of all instances."""
        return self._inner

    # --- a front ------

    def add(self, i: int, request: Request) -> None:
        source, target = self._ways.way(i, request)
        if target >= 0:
            self._all[target].check(request)
        flight = self._flights[request] = Flight(request)
        self._ways.bind(flight, target)
        if source < 0:
            self._ways.compute_here(flight)
            self._inner.add(target, request)
            return
        more = request.output > 1
        flight.first = Request(
            request.id, request.prompt, 1, request.path, keep=request.keep and not more, hold=more, owner=flight
        )
        self._all[source].check(flight.first)
        flight.source = source
        flight.tokens = self._ways.missing(source, request)
        flight.blocks = -(-(request.prompt + 1) // self._wire.block)
        self._sources[source].put(flight)

    def cancel(self, i: int, request: Request) -> bool:  # noqa: ARG002 - it may be elsewhere by now
        flight = self._flights[request]
        gone = self._inner.cancel(flight.target, request) if flight.phase == "decode" else self._withdraw(flight)
        if gone:
            self._forget(flight)
        return gone

    def load(self, i: int, load: Load) -> None:
        self._modes[i] = load.mode
        self._loading.add(i)
        for request in self._all[i].waiting:
            if request.ready:
                self._outdate(i, request)
        self._inner.load(i, load)

    def crash(self, i: int) -> list[Request]:
        """What is lost, in order of arrival."""
        self._ways.live[i] = False
        self._loading.discard(i)
        self._inner.crash(i)
        computes = i in self._sources
        if computes:
            self._sources[i] = self._source(i)
            lost = [flight for flight in self._flights.values() if flight.source == i and flight.phase != "decode"]
        else:
            lost = [flight for flight in self._flights.values() if flight.target == i]
        for flight in lost:
            if computes:
                self._stop(flight)
            elif flight.phase != "decode":
                self._withdraw(flight)
            flight.request.ready = False
            self._forget(flight)
        return [flight.request for flight in lost]

    def up(self, i: int, version: int) -> None:
        self._inner.up(i, version)
        self._ways.live[i] = True
        stranded, self._stranded = self._stranded, []
        for flight in stranded:
            self._ship(flight)

    def insert(self, i: int, path: Path, blocks: int) -> None:
        self._inner.insert(i, path, blocks)

    def forget(self, chains: list[int]) -> None:
        self._inner.forget(chains)

    # --- what the instances tell ------

    def on_first_token(self, instance: int, request: Request) -> None:
        if instance in self._sources:
            flight: Flight = request.owner
            if flight.phase == "gone":
                return
            request = flight.request
            request.sampled, request.hit = 1, flight.first.hit
        else:
            self._ways.computed_here(self._flights[request])
        self._listener.on_first_token(instance, request)

    def on_end(self, instance: int, request: Request) -> None:
        if instance in self._sources:
            self._prefilled(instance, request.owner)
            return
        flight = self._flights[request]
        if flight.version >= 0:
            request.versions = (flight.version, request.versions[1])
        self._forget(flight)
        self._listener.on_end(instance, request)

    def on_loaded(self, instance: int, version: int) -> None:
        self._loading.discard(instance)
        self._listener.on_loaded(instance, version)

    # --- the prompt ------

    def _source(self, i: int) -> Source:
        return Source(self._all[i].memory.capacity, lambda flight: self._inner.add(i, flight.first))

    def _prefilled(self, i: int, flight: Flight) -> None:
        first, request, source = flight.first, flight.request, self._sources[i]
        source.computed(flight)
        if flight.phase == "gone":
            source.free(flight)
            return
        request.hit, request.preemptions = first.hit, first.preemptions
        request.sampled, request.versions = first.sampled, first.versions
        flight.version = first.versions[0]
        if first.cancelled or request.output == 1:
            request.cancelled = first.cancelled
            self._forget(flight)
            source.free(flight)
            self._listener.on_end(i, request)
        else:
            flight.phase = "wire"
            self._ship(flight)

    # --- the wire ------

    def _ship(self, flight: Flight) -> None:
        """All that the target lacks sets out."""
        if flight.target < 0:
            self._ways.bind(flight, self._ways.least())
        if flight.target < 0:
            self._stranded.append(flight)
            return
        flight.have = self._usable(flight)
        self._send(flight, max(0, flight.request.prompt - flight.have * self._wire.block))

    def _send(self, flight: Flight, tokens: int) -> None:
        wire = self._wire
        ports = flight.source, flight.target
        flight.transfer = self._links.send(ports, wire.size(tokens), lambda: self._arrived(flight), wire.latency_fs)

    def _arrived(self, flight: Flight) -> None:
        request, target = flight.request, flight.target
        old = self._is_old(flight)
        lacking = flight.have - self._usable(flight)
        if lacking > 0 and not (old and self._modes[target] == "abort"):  # evicted meanwhile
            flight.have -= lacking
            self._send(flight, lacking * self._wire.block)
            return
        request.ready = True
        if old:
            self._outdate(target, request)
        self._let_go(flight)
        flight.phase = "decode"
        self._inner.add(target, request)

    def _usable(self, flight: Flight) -> int:
        """Blocks of the prompt that the target holds, of the same weights."""
        return 0 if self._is_old(flight) else self._ways.held(flight.target, flight.request)

    def _is_old(self, flight: Flight) -> bool:
        i = flight.target
        return i in self._loading or self._all[i].version != flight.version

    def _outdate(self, i: int, request: Request) -> None:
        """Its KV is of other weights than the instance serves from now on."""
        if self._modes[i] == "abort":
            request.ready = False
        else:
            request.path = ()

    def _let_go(self, flight: Flight) -> None:
        self._inner.let_go(flight.source, flight.first)
        self._sources[flight.source].free(flight)

    # --- the end of a flight ------

    def _forget(self, flight: Flight) -> None:
        del self._flights[flight.request]
        flight.phase = "gone"
        self._ways.unbind(flight)

    def _withdraw(self, flight: Flight) -> bool:
        """It is not decoding yet, and not to. False: its prefill ends with the iteration under way."""
        source = self._sources[flight.source]
        if flight.phase == "queued":
            source.remove(flight)
        elif flight.phase == "wire":
            self._stop(flight)
            self._let_go(flight)
        elif self._inner.cancel(flight.source, flight.first):
            source.computed(flight)
            source.free(flight)
        else:
            return False
        return True

    def _stop(self, flight: Flight) -> None:
        """Nothing of it crosses any more."""
        if flight.transfer is not None:
            self._links.cancel(flight.transfer)
        elif flight in self._stranded:
            self._stranded.remove(flight)
