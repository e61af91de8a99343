"""The serving world: sessions of a trace against instances and routers, without data pool and trainer.

Decide, act, account: a request's router sees the view that the live gateway would fold, the request goes where it says,
and what becomes of it is one row of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import simpy

from forge.draws import draw
from forge.instances import Instances, RouterView
from forge.policies.kv import KvRetention
from forge.policies.router import Fetching, Router
from forge.prefix_index import PrefixIndex
from sim import garbage
from sim.alarm import HAPPEN, Alarm
from sim.clock import to_fs, to_s
from sim.engine import Instance
from sim.fetch import Fabric, Fetches
from sim.fleet import Fleet
from sim.front import Build, Front
from sim.request import Request
from sim.sessions import Frontier, Session, Trace
from sim.signals import Report, Signals
from sim.uses import Uses


class Row(NamedTuple):
    """What became of a request. Times in femtoseconds on the run's clock, counts in tokens."""

    session: int
    step: int
    instance: int
    arrived: int
    first: int
    ended: int
    prompt: int
    output: int
    hit: int
    preemptions: int

    @property
    def ttft_s(self) -> float:
        return to_s(self.first - self.arrived)

    @property
    def tpot_s(self) -> float:
        return to_s(self.ended - self.first) / max(1, self.output - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """How sessions start: at their own times (open), or so that `concurrency` of them are always under way (closed).

    A closed loop is how agents behave, who send their next request when the last is answered; in either, the steps of
    a session wait for one another.
    """

    concurrency: int | None = None


class _Side:
    """A router, what it sees, and how it has KV moved, if it does."""

    __slots__ = ("fetching", "router", "views")

    def __init__(self, router: Router, views: Instances, fetching: Fetching | None) -> None:
        self.router = router
        self.views = views
        self.fetching = fetching


class _Live:
    """A session under way, and whose it is."""

    __slots__ = ("frontier", "id", "session", "side")

    def __init__(self, number: int, session: Session, side: _Side) -> None:
        self.id = number
        self.side = side
        self.session = session
        self.frontier = Frontier(session.steps)


class Serving:
    """One run. `rows` are in the order of completion; `on_row` gets each instead where given (a long run).

    `beside`: further routers in parallel with `router`, of its kind. Sessions go round them, each stays with its own. A
    router sees what it sent itself, and what instances report to all.
    `fabric`: instances can fetch KV from one another, where the router asks for it (`forge.policies.router.Fetching`).
    `kv`: which chains are given up first, by the sessions under way; None: the least recently used.
    `front`: makes what stands before the instances, by default nothing (`sim.deploy.Machines`).
    """

    def __init__(
        self,
        trace: Trace,
        instances: Sequence[Instance],
        router: Router,
        *,
        beside: Sequence[Router] = (),
        loop: Loop = Loop(),
        period_s: float = 0.0,
        delay_s: float = 0.0,
        seed: int = 0,
        on_row: Callable[[Row], None] | None = None,
        fabric: Fabric | None = None,
        front: Build | None = None,
        kv: KvRetention | None = None,
    ) -> None:
        self.env: Any = simpy.Environment()
        self.rows: list[Row] = []
        self.fleet: Front = Fleet(self.env, instances, self) if front is None else front(self.env, self)
        self._fetches = None if fabric is None else Fetches(self.env, self.fleet, fabric)
        self._uses = None if kv is None else Uses(kv, self.fleet.forget)
        self._index = PrefixIndex()
        self._sides = [self._side(one, trace.block) for one in (router, *beside)]
        self._load = router.reads_load
        self._signals = Signals(self.env, self.fleet, period_s, delay_s, self._on_report, load=self._load)
        self._sessions: Iterator[Session] = iter(trace.sessions())
        self._next: Session | None = next(self._sessions, None)
        self._loop = loop
        self._seed = seed
        self._on_row = on_row or self.rows.append
        self._started = 0
        self._live = 0
        self._requests = 0
        self._block = trace.block
        self._feeder = Alarm(self.env, HAPPEN, lambda _: self._feed())

    def _side(self, router: Router, block: int) -> _Side:
        views = Instances(len(self.fleet.instances), block, self._index)
        fetching = router if isinstance(router, Fetching) else None
        return _Side(router, views, None if self._fetches is None else fetching)

    def run(self) -> list[Row]:
        if self._loop.concurrency is None:
            if self._next is not None:
                self._feeder.set(to_fs(self._next.start_s))
        else:
            for _ in range(self._loop.concurrency):
                self._start_next()
        step = self.env.step
        with garbage.seldom():
            while self._next is not None or self._live:
                step()
        return self.rows

    @property
    def fetched_blocks(self) -> int:
        """Sent from one instance to another because the router said so."""
        return 0 if self._fetches is None else self._fetches.blocks

    # --- sessions ------

    def _feed(self) -> None:
        """Open loop: start what is due."""
        now: int = self.env.now
        while self._next is not None and (at := to_fs(self._next.start_s)) <= now:
            self._start_next()
        if self._next is not None:
            self._feeder.set(at)

    def _start_next(self) -> None:
        session = self._next
        if session is None:
            return
        self._next = next(self._sessions, None)
        live = _Live(self._started, session, self._sides[self._started % len(self._sides)])
        self._started += 1
        self._live += 1
        for number in live.frontier.first():
            self._later(live, number, session.steps[number].delay_s)

    def _later(self, live: _Live, number: int, delay_s: float) -> None:
        if delay_s:
            Alarm(self.env, HAPPEN, lambda _: self._send(live, number)).set(self.env.now + to_fs(delay_s))
        else:
            self._send(live, number)

    def _answered(self, live: _Live, number: int) -> None:
        free = live.frontier.answered(number)
        if not live.frontier.left:
            self._live -= 1
            if self._uses is not None:
                self._uses.over(live.id)
            if self._loop.concurrency is not None:
                self._start_next()
            return
        for later in free:
            self._later(live, later, live.session.steps[later].delay_s)

    # --- requests ------

    def _send(self, live: _Live, number: int) -> None:
        step, side = live.session.steps[number], live.side
        now: int = self.env.now
        now_s = to_s(now)
        self._signals.refresh()
        cached = side.views.cached(step.path)
        view = RouterView(
            now=now_s,
            draw=draw(self._seed, 0, self._requests),
            trajectory=live.session.name,
            turn=number,
            prompt_tokens=step.prompt,
            instances=side.views.views(),
            cached=cached,
        )
        chosen = side.router.route(view)
        name = str(self._requests)
        self._requests += 1
        request = Request(name, step.prompt, step.output, step.path, keep=step.keep)
        request.owner = live, number, now
        if self._uses is not None:
            self._uses.asks(live.id, step.path)
        self.fleet.instances[chosen].check(request)
        source = side.fetching.source(view, chosen) if side.fetching is not None else None
        known = cached.get(chosen if source is None else source, 0)
        side.views.routed(name, chosen, step.prompt, min(known, step.prompt - 1), now_s)
        if self._fetches is None or source is None:
            self.fleet.add(chosen, request)
        else:
            self._fetches.begin(source, chosen, request)

    def _on_report(self, report: Report) -> None:
        if self._load:
            free_tokens = report.free_blocks * self._block
            load = report.running, report.waiting, free_tokens, report.queued_tokens, report.queued_pairs
            for side in self._sides:
                side.views.reported(report.instance, report.seen_s, *load)
        self._sides[0].views.stored(report.instance, report.chains)

    def on_first_token(self, instance: int, request: Request) -> None:
        live: _Live = request.owner[0]
        live.side.views.first_token(request.id, to_s(self.env.now))
        request.owner = (*request.owner, instance, self.env.now)

    def on_end(self, instance: int, request: Request) -> None:
        live, number, arrived, _, first = request.owner
        live.side.views.completed(request.id, to_s(self.env.now))
        self._on_row(
            Row(
                live.id,
                number,
                instance,
                arrived,
                first,
                self.env.now,
                request.prompt,
                request.output,
                request.hit or 0,
                request.preemptions,
            )
        )
        self._answered(live, number)

    def on_loaded(self, instance: int, version: int) -> None:
        for side in self._sides:
            side.views.loaded(instance, version)
