"""What policies see, and the pure fold over trace events that builds it: the same code in both worlds.

A view holds only what the live system can observe. Time is `view.now`, randomness is `view.draw` in [0, 1).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from forge import trace as ev
from forge.instances import Instances, Path, RouterView
from forge.queue import ItemQueue, QueueShape
from forge.types import ItemState

_POSITION = attrgetter("position")


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemView:
    """One waiting item (running or finished, not taken) as a scheduler sees it."""

    position: int
    finished: bool
    domain: str
    submitted_s: float
    finished_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """For the train scheduler. `waiting` is in position order, and `finished` are those of them that have ended;
    `head` is the lowest of all but the `parked` first ones. Both as they are now: they go on changing, so a scheduler
    reads them and keeps none.

    `submitted` counts positions given out, `training` items in the trainer.
    """

    now: float
    draw: float
    n: int
    batch: int
    head: int
    forming: int
    training: int
    submitted: int
    parked: int
    waiting: Collection[ItemView]
    finished: Sequence[ItemView]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncView:
    """For weight sync, asked after every commit. Counts are since the run began."""

    now: float
    draw: float
    step: int
    version: int
    steps_unpublished: int
    requests_in_flight: int


@dataclass(slots=True)
class DomainView:
    """One domain of the mix. Items of it, counted since this life of the run began, with those it found waiting: given
    out, under way, finished and not yet taken, dead."""

    name: str
    weight: float
    submitted: int = 0
    running: int = 0
    finished: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchView:
    """For dispatch: whether to begin another item, and of which domain. `submitted` positions were given out, `running`
    items are under way of at most `concurrency`; `in_flight` requests are at `instances` live instances, `unanswered`
    ones of them without a first token. `domains` as they are now: they go on changing."""

    now: float
    draw: float
    submitted: int
    running: int
    concurrency: int
    in_flight: int
    unanswered: int
    instances: int
    domains: tuple[DomainView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """For dispatch: whether to let this request through. `in_flight` others are at `instances` live instances."""

    now: float
    draw: float
    trajectory: str
    turn: int
    in_flight: int
    instances: int


@dataclass(slots=True)
class _Item:
    domain: str
    submitted_s: float
    finished_s: float | None = None
    tokens: int = 0  # sampled; known once it finished in this life


@dataclass(slots=True)
class Views:
    """State folded from events. Only `apply` changes it; an illegal event raises QueueError or TraceError."""

    shape: QueueShape
    instances_n: int
    block: int = 1  # tokens of the KV blocks that requests' paths count
    mix: Mapping[str, float] = field(default_factory=dict)  # domains and their weights
    concurrency: int = 1
    queue: ItemQueue = field(init=False)
    now: float = 0.0
    step: int = 0
    version: int = 0  # newest version that every live engine serves
    published_step: int = 0
    items: dict[int, _Item] = field(default_factory=dict)
    _waiting: dict[int, ItemView] = field(default_factory=dict)  # running or finished, in position order
    _finished: list[ItemView] = field(default_factory=list)  # in position order
    instances: Instances = field(init=False)
    domains: dict[str, DomainView] = field(init=False)

    def __post_init__(self) -> None:
        self.queue = ItemQueue(self.shape)
        self.instances = Instances(self.instances_n, self.block)
        self.domains = {name: DomainView(name, weight) for name, weight in self.mix.items()}

    def view(
        self, slot: str, draw: float, args: Mapping[str, Any]
    ) -> QueueView | RouterView | SyncView | DispatchView | AdmissionView:
        """The view a policy slot gets now. `args` is what the call is about, beyond the folded state."""
        match slot:
            case "scheduler":
                return self.queue_view(draw)
            case "router":
                path = [(chain, blocks) for chain, blocks in args.get("path", ())]  # lists, in a trace that was read
                return self.router_view(draw, **{**args, "path": path})
            case "sync":
                return self.sync_view(draw)
            case "dispatch":
                return self.admission_view(draw, **args) if args else self.dispatch_view(draw)
        raise KeyError(slot)

    # --- views ------

    def queue_view(self, draw: float) -> QueueView:
        queue = self.queue
        return QueueView(
            now=self.now,
            draw=draw,
            n=self.shape.n,
            batch=self.shape.batch,
            head=queue.head,
            forming=len(queue.forming),
            training=len(queue.training),
            submitted=len(queue),
            parked=sum(p in self._waiting for p in queue.parked),
            waiting=self._waiting.values(),
            finished=self._finished,
        )

    def router_view(
        self, draw: float, *, trajectory: str, turn: int, prompt_tokens: int, path: Path = ()
    ) -> RouterView:
        return RouterView(
            now=self.now,
            draw=draw,
            trajectory=trajectory,
            turn=turn,
            prompt_tokens=prompt_tokens,
            instances=self.instances.views(),
            cached=self.instances.cached(path),
        )

    def sync_view(self, draw: float) -> SyncView:
        return SyncView(
            now=self.now,
            draw=draw,
            step=self.step,
            version=self.version,
            steps_unpublished=self.step - self.published_step,
            requests_in_flight=self.instances.in_flight,
        )

    def dispatch_view(self, draw: float) -> DispatchView:
        live = self.instances.views()
        return DispatchView(
            now=self.now,
            draw=draw,
            submitted=len(self.queue),
            running=self.queue.running,
            concurrency=self.concurrency,
            in_flight=self.instances.in_flight,
            unanswered=sum(one.unanswered for one in live),
            instances=len(live),
            domains=tuple(self.domains.values()),
        )

    def admission_view(self, draw: float, *, trajectory: str, turn: int) -> AdmissionView:
        return AdmissionView(
            now=self.now,
            draw=draw,
            trajectory=trajectory,
            turn=turn,
            in_flight=self.instances.in_flight,
            instances=len(self.instances.views()),
        )

    # --- the fold ------

    def apply(self, event: ev.Event) -> None:
        self.now = event.t
        match event:
            case ev.Submitted():
                position = self.queue.submit()
                if position != event.position:
                    raise ev.TraceError(f"submitted {event.position}, the queue is at {position}")
                self.items[position] = _Item(event.domain, event.t)
                domain = self._domain(event.domain)
                domain.submitted += 1
                domain.running += 1
                self._see(position)
            case ev.Finished():
                self.queue.finish(event.position)
                item = self.items[event.position]
                item.finished_s, item.tokens = event.t, event.tokens
                domain = self._domain(item.domain)
                domain.running -= 1
                domain.finished += 1
                self._see(event.position)
            case ev.Dead():
                self.queue.die(event.position)
                self._leave(event.position)
                self._domain(self.items.pop(event.position).domain).dead += 1
            case ev.Taken():
                self.queue.take(event.position)
                self._leave(event.position)
            case ev.Parked():
                self.queue.park(event.position)
            case ev.StepStarted():
                self.queue.start_step(partial=event.partial)
            case ev.Committed():
                for position in self.queue.commit():
                    del self.items[position]
                self.step = event.step
            case ev.Published():
                self.queue.publish(event.items)
                self.version, self.published_step = event.version, event.step
            case ev.Resumed():
                self._resume(event)
            case _:
                self._apply_instance(event)

    def _see(self, position: int) -> None:
        """What schedulers see of a waiting item changed; it keeps its place in the order."""
        item = self.items[position]
        seen = ItemView(
            position=position,
            finished=self.queue.states[position] is ItemState.FINISHED,
            domain=item.domain,
            submitted_s=item.submitted_s,
            finished_s=item.finished_s,
        )
        self._waiting[position] = seen
        if seen.finished:
            insort(self._finished, seen, key=_POSITION)

    def _leave(self, position: int) -> None:
        """It waits no more."""
        left = self._waiting.pop(position)
        domain = self._domain(left.domain)
        if left.finished:
            del self._finished[bisect_left(self._finished, position, key=_POSITION)]
            domain.finished -= 1
        else:
            domain.running -= 1

    def _domain(self, name: str) -> DomainView:
        """A domain that is not of the mix, of a trace that was read say, has no weight."""
        if name not in self.domains:
            self.domains[name] = DomainView(name, 0.0)
        return self.domains[name]

    def _apply_instance(self, event: ev.Event) -> None:
        instances = self.instances
        match event:
            case ev.Routed():
                if not instances.is_live(event.instance):
                    raise ev.TraceError(
                        f"request {event.request} routed to instance {event.instance}, which is not live"
                    )
                instances.routed(event.request, event.instance, event.prompt_tokens, event.cached_tokens, event.t)
            case ev.FirstToken():
                instances.first_token(event.request, event.t)
            case ev.Completed():
                if not instances.completed(event.request, event.t):
                    raise ev.TraceError(f"request {event.request} completed, but it is not in flight")
            case ev.Reported():
                load = event.running, event.waiting, event.free_tokens, event.queued_tokens, event.queued_pairs
                instances.reported(event.instance, event.seen_s, *load)
                instances.stored(event.instance, event.chains)
            case ev.Loaded():
                instances.loaded(event.instance, event.version)
            case ev.InstanceDown():
                instances.down(event.instance)
            case ev.InstanceUp():
                instances.up(event.instance, event.version)
            case _:
                pass

    def _resume(self, event: ev.Resumed) -> None:
        """A new life of the run: the durable pool is the truth, requests in flight are gone."""
        self.queue = ItemQueue.from_dict(self.shape, event.queue)
        self.step, self.version, self.published_step = event.step, event.version, event.published_step
        self.items = {
            int(p): _Item(domain, submitted_s, finished_s)
            for p, (domain, submitted_s, finished_s) in event.items.items()
        }
        self._waiting, self._finished = {}, []
        self.domains = {name: DomainView(name, weight) for name, weight in self.mix.items()}
        for position in self.queue.waiting():
            self._see(position)
            domain, finished = self._domain(self.items[position].domain), self._waiting[position].finished
            domain.submitted += 1
            domain.finished += finished
            domain.running += not finished
        self.instances = Instances(self.instances_n, self.block)
        for i in range(self.instances_n):
            self.instances.loaded(i, event.version)
