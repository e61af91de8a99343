"""One row a request, one row an item: a trace of either world as two tables, folded as a stream.

Kept in memory are requests under way and items not yet at their end; rows leave as soon as no later event can change
them. Several lives of a resumed run become one story, as in `fold.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from forge import trace as ev
from forge.metrics.fold import GIVEN_UP
from forge.types import ItemState

ENDED = (ItemState.PUBLISHED, ItemState.DEAD)


@dataclass(slots=True, kw_only=True)
class RequestRow:
    """One request on one instance. Seconds are on the run's clock; None: it never happened, or its life was killed."""

    request: str
    position: int
    member: int
    turn: int
    domain: str | None
    instance: int
    item_submitted_s: float | None
    routed_s: float
    first_token_s: float | None = None
    completed_s: float | None = None
    prompt_tokens: int
    cached_tokens: int
    tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    finish: str | None = None
    version_first: int | None = None
    version_last: int | None = None


@dataclass(slots=True, kw_only=True)
class ItemRow:
    """One item, with its state where the trace ends. `versions` are those that sampled what its members are made of."""

    position: int
    domain: str
    difficulty: float | None = None
    members: int | None = None
    survivors: int = 0
    state: ItemState = ItemState.RUNNING
    submitted_s: float
    finished_s: float | None = None
    taken_s: float | None = None
    committed_s: float | None = None
    published_s: float | None = None
    dead_s: float | None = None
    death_reason: str | None = None
    step: int | None = None
    lag_items: int | None = None
    lag_versions: int | None = None
    version_first: int | None = None
    version_last: int | None = None
    tokens: int | None = None
    reward: float | None = None

    def sampled(self, versions: tuple[int, int]) -> None:
        first, last = versions
        self.version_first = first if self.version_first is None else min(self.version_first, first)
        self.version_last = last if self.version_last is None else max(self.version_last, last)

    def back_to(self, state: ItemState) -> None:
        """The pool has it in `state`; what was traced beyond that never became durable."""
        self.state = state
        if state in (ItemState.RUNNING, ItemState.FINISHED):
            self.taken_s = self.committed_s = self.step = self.lag_items = self.lag_versions = None
        if state is ItemState.RUNNING:  # it is played again from its beginning
            self.finished_s = self.tokens = self.reward = self.version_first = self.version_last = None
            self.survivors = 0
        if state is not ItemState.DEAD:
            self.dead_s = self.death_reason = None


@dataclass(slots=True)
class TableFold:
    """Feed it every event in order; `drain` gives the rows that are complete, `rest` those that never will be.

    Requests leave in the order they ended, items in the order of their positions.
    """

    _requests: list[RequestRow] = field(default_factory=list)
    _items: list[ItemRow] = field(default_factory=list)
    _sent: dict[str, RequestRow] = field(default_factory=dict)
    _open: dict[int, ItemRow] = field(default_factory=dict)  # ascending; those at their end wait for lower ones
    _committed: deque[int] = field(default_factory=deque)  # and not published, in that order
    _published: int = 0
    _left: int = 0  # positions below have left

    def apply(self, event: ev.Event) -> None:
        match event:
            case ev.Routed():
                self._routed(event)
            case ev.FirstToken():
                if (row := self._sent.get(event.request)) and row.first_token_s is None:
                    row.first_token_s = event.t
                    row.ttft_s = event.t - row.routed_s
            case ev.Completed():
                self._completed(event)
            case ev.Committed() | ev.Published():
                self._trained(event)
            case ev.Resumed():
                self._resume(event)
            case ev.Submitted():
                self._open[event.position] = ItemRow(
                    position=event.position,
                    domain=event.domain,
                    difficulty=event.difficulty,
                    members=event.members,
                    submitted_s=event.t,
                )
            case ev.MemberDone() | ev.Finished() | ev.Dead() | ev.Taken():
                if item := self._open.get(event.position):
                    _happen(item, event)

    def drain(self) -> tuple[list[RequestRow], list[ItemRow]]:
        """The rows that no later event changes, each once."""
        for position in list(self._open):
            if self._open[position].state not in ENDED:
                break
            self._items.append(self._open.pop(position))
            self._left = position + 1
        done = (self._requests, self._items)
        self._requests, self._items = [], []
        return done

    def rest(self) -> tuple[list[RequestRow], list[ItemRow]]:
        """At the end of a trace: requests that never ended, items short of publication and death."""
        self._give_up()
        requests, items = self.drain()
        items += self._open.values()
        self._open.clear()
        return requests, items

    # --- requests ------

    def _routed(self, event: ev.Routed) -> None:
        item = self._open.get(event.position)
        if event.request in self._sent:  # sent again under its name, and the trace does not say how it ended
            self._requests.append(self._sent.pop(event.request))
        self._sent[event.request] = RequestRow(
            request=event.request,
            position=event.position,
            member=event.member,
            turn=event.turn,
            domain=item.domain if item else None,
            instance=event.instance,
            item_submitted_s=item.submitted_s if item else None,
            routed_s=event.t,
            prompt_tokens=event.prompt_tokens,
            cached_tokens=event.cached_tokens,
        )

    def _completed(self, event: ev.Completed) -> None:
        row = self._sent.pop(event.request, None)
        if row is None:
            return
        row.completed_s, row.tokens, row.finish = event.t, event.tokens, event.finish
        if row.first_token_s is not None and event.tokens > 1:
            row.tpot_s = (event.t - row.first_token_s) / (event.tokens - 1)
        if event.tokens:
            row.version_first, row.version_last = event.versions
            if event.finish not in GIVEN_UP and (item := self._open.get(row.position)):
                item.sampled(event.versions)
        self._requests.append(row)

    def _give_up(self) -> None:
        self._requests += self._sent.values()
        self._sent.clear()

    # --- items ------

    def _trained(self, event: ev.Committed | ev.Published) -> None:
        if isinstance(event, ev.Committed):
            for position in event.positions:
                self._committed.append(position)
                if item := self._open.get(position):
                    item.state, item.committed_s, item.step = ItemState.COMMITTED, event.t, event.step
                    if item.version_first is not None:
                        item.lag_versions = event.step - 1 - item.version_first
            return
        while self._committed and self._published < event.items:
            self._published += 1
            if item := self._open.get(self._committed.popleft()):
                item.state, item.published_s = ItemState.PUBLISHED, event.t

    def _resume(self, event: ev.Resumed) -> None:
        """The durable pool is the truth, and requests under way are gone with the process that asked for them."""
        self._give_up()
        states = [ItemState(s) for s in event.queue["states"]]
        self._published = int(event.queue["published"])
        self._committed = deque(event.queue["committed"][self._published :])
        known = {p: item for p, item in self._open.items() if p < len(states)}
        for position in range(self._left, len(states)):
            item = known.get(position)
            if item is None:
                domain, submitted_s, finished_s = event.items.get(str(position), ("?", event.t, None))
                item = ItemRow(position=position, domain=domain, submitted_s=submitted_s, finished_s=finished_s)
            item.back_to(states[position])
            known[position] = item
        self._open = dict(sorted(known.items()))


def _happen(item: ItemRow, event: ev.MemberDone | ev.Finished | ev.Dead | ev.Taken) -> None:
    match event:
        case ev.MemberDone():
            item.survivors += event.reward is not None
        case ev.Finished():
            item.state, item.finished_s = ItemState.FINISHED, event.t
            item.tokens, item.reward = event.tokens, event.reward
        case ev.Dead():
            item.state, item.dead_s = ItemState.DEAD, event.t
            item.death_reason, item.tokens = event.reason, event.tokens
        case ev.Taken():
            item.state, item.taken_s, item.lag_items = ItemState.TAKEN, event.t, event.lag_items
