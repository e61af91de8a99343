"""Records of items, steps, requests and engine counters, gathered from a trace of either world in one pass.

Tolerant on purpose: a trace that breaks a law still folds, so that `laws.py` can say what broke and the figures show
how. Several lives of a resumed run become one story: at `resumed` the durable pool's state is the truth.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from forge import trace as ev
from forge.control import Served
from forge.types import ItemState

USED = (ItemState.COMMITTED, ItemState.PUBLISHED)

#: how requests end that give their tokens to no trajectory
GIVEN_UP = ("cancelled", "lost")


@dataclass(slots=True, kw_only=True)
class ItemRecord:
    """One item's story. Seconds are on the run's clock; None: it has not happened, or the trace does not know."""

    position: int
    domain: str
    submitted_s: float
    difficulty: float | None = None
    members: int | None = None
    survivors: set[int] = field(default_factory=set)  # members that ended with a reward
    finished_s: float | None = None
    tokens: int | None = None  # sampled; of a dead item: until it died
    reward: float | None = None
    parked_s: float | None = None  # when it stepped aside as a straggler
    taken_s: float | None = None
    lag_items: int | None = None
    step: int | None = None
    committed: bool = False
    dead_s: float | None = None
    reason: str | None = None
    version: int | None = None  # trainer step of the oldest weights that sampled a token of it

    @property
    def is_passed(self) -> bool:
        """The head need not wait for it."""
        return self.taken_s is not None or self.dead_s is not None or self.parked_s is not None

    @property
    def lag_versions(self) -> int | None:
        """Trainer steps between those weights and the ones its step began with."""
        return None if self.step is None or self.version is None else self.step - 1 - self.version

    def back_to(self, state: ItemState) -> None:
        """The pool has it in `state`; what was traced beyond that never became durable."""
        if state not in USED and state is not ItemState.TAKEN:
            self.taken_s = self.lag_items = self.step = None
            self.committed = False
        if state is ItemState.RUNNING:
            self.finished_s = self.tokens = self.reward = self.version = None
            self.survivors = set()
        if state is not ItemState.DEAD:
            self.dead_s = self.reason = None


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One committed trainer step: its batch in the order taken, and the seconds of each part of it."""

    step: int
    started_s: float
    committed_s: float
    positions: tuple[int, ...]
    train_s: float
    data_s: float
    io_s: float
    tokens: int
    metrics: dict[str, float | None]


@dataclass(slots=True)
class RunFold:
    """Everything the figures and plots need. Feed it every event with `apply`, in order."""

    world: str = ""
    seed: int = 0
    wall_s: float = 0.0
    ended: str | None = None
    items: dict[int, ItemRecord] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    step: int = 0  # newest committed one
    version: int = 0  # newest published one
    published: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, version, items
    resumed_s: list[float] = field(default_factory=list)
    trainer_spans: list[tuple[float, float]] = field(default_factory=list)  # batches lost to a crash included
    load_s: float = 0.0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    sampled_tokens: int = 0  # of requests that left their instance
    busy_s: float = 0.0  # summed over instances and lives, as are the four below
    engine_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int | None = None  # of prompts, found instead of prefilled
    refused: int = 0  # requests answered with 429
    usage: list[tuple[float, float]] = field(default_factory=list)  # seconds, busy_s so far
    instance_usage: list[tuple[float, tuple[float, ...]]] = field(default_factory=list)  # the same, per instance
    #: three numbers a request: routed at, prompt tokens, of those believed cached
    prompts: array[float] = field(default_factory=lambda: array("d"))
    evaluations: list[ev.Evaluated] = field(default_factory=list)
    heads: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])  # seconds, head from then on
    _head: int = 0
    _sent: dict[str, tuple[int, float, float | None]] = field(default_factory=dict)  # position, routed, first token
    _batch: tuple[float, tuple[int, ...]] | None = None  # started, positions
    _last: list[tuple[float, int, int, int, int]] = field(default_factory=list)  # counters per instance at last usage

    @property
    def calls(self) -> int:
        """Requests that were routed."""
        return len(self.prompts) // 3

    def apply(self, event: ev.Event) -> None:
        before, self.wall_s = self.wall_s, max(self.wall_s, event.t)
        match event:
            case ev.RunStarted():
                self.world, self.seed = event.world, event.seed
            case ev.Resumed():
                self._resume(event, before)
            case ev.Evaluated():
                self.evaluations.append(event)
            case ev.RunEnded():
                self.ended = event.reason
            case ev.Routed() | ev.FirstToken() | ev.Completed():
                self._request(event)
            case ev.Usage():
                self._usage(event)
            case ev.Refused():
                self.refused += 1
            case ev.StepStarted() | ev.Committed() | ev.Loaded() | ev.Published():
                self._training(event)
            case _:
                self._item(event)

    # --- items ------

    def _item(self, event: ev.Event) -> None:
        match event:
            case ev.Submitted():
                self.items[event.position] = ItemRecord(
                    position=event.position,
                    domain=event.domain,
                    submitted_s=event.t,
                    difficulty=event.difficulty,
                    members=event.members,
                )
            case ev.MemberDone():
                item = self.items.get(event.position)
                if item and event.reward is not None:
                    item.survivors.add(event.member)
            case ev.Finished():
                if item := self.items.get(event.position):
                    item.finished_s, item.tokens, item.reward = event.t, event.tokens, event.reward
            case ev.Dead():
                if item := self.items.get(event.position):
                    item.dead_s, item.reason, item.tokens = event.t, event.reason, event.tokens
                    self._move_head(event.t)
            case ev.Taken():
                if item := self.items.get(event.position):
                    item.taken_s, item.lag_items = event.t, event.lag_items
                    self._move_head(event.t)
            case ev.Parked():
                if item := self.items.get(event.position):
                    item.parked_s = event.t
                    self._move_head(event.t)

    def _move_head(self, t: float) -> None:
        before = self._head
        while (item := self.items.get(self._head)) and item.is_passed:
            self._head += 1
        if self._head != before:
            self.heads.append((t, self._head))

    # --- requests and engines ------

    def _request(self, event: ev.Routed | ev.FirstToken | ev.Completed) -> None:
        match event:
            case ev.Routed():
                self._sent[event.request] = (event.position, event.t, None)
                self.prompts.extend((event.t, event.prompt_tokens, event.cached_tokens))
            case ev.FirstToken():
                position, routed, first = self._sent.get(event.request, (0, 0.0, event.t))
                if first is None:
                    self._sent[event.request] = (position, routed, event.t)
                    self.ttft_s.append(event.t - routed)
            case ev.Completed():
                position, _, first = self._sent.pop(event.request, (-1, 0.0, None))
                self._left(position, first, event.t, event.tokens, event.finish, event.versions[0])

    def _left(
        self, position: int, first_s: float | None, ended_s: float, tokens: int, finish: str, oldest: int
    ) -> None:
        """A request left its instance; weights as old as version `oldest` sampled its tokens."""
        self.sampled_tokens += tokens
        if first_s is not None and tokens > 1:
            self.tpot_s.append((ended_s - first_s) / (tokens - 1))
        item = self.items.get(position)
        if item and tokens and finish not in GIVEN_UP and (item.version is None or oldest < item.version):
            item.version = oldest

    def served(self, request: Served) -> None:
        """A request that made no events."""
        self.prompts.extend((request.routed_s, request.prompt_tokens, request.cached_tokens))
        if request.first_s is not None:
            self.ttft_s.append(request.first_s - request.routed_s)
        self._left(request.position, request.first_s, request.ended_s, request.tokens, request.finish, request.version)

    def _usage(self, event: ev.Usage) -> None:
        found = event.cached_tokens or (0,) * len(event.busy_s)
        now = list(zip(event.busy_s, event.steps, event.prefill_tokens, event.decode_tokens, found, strict=True))
        if not self.items:  # what engines did before the first item (held-out evaluation) is no work of the run
            self._last = now
        zero = (0.0, 0, 0, 0, 0)
        busy = list(self.instance_usage[-1][1]) if self.instance_usage else [0.0] * len(now)
        for i, counters in enumerate(now):
            last = self._last[i] if i < len(self._last) else zero
            if counters[0] < last[0]:  # the instance was restarted within the life
                last = zero
            self.busy_s += counters[0] - last[0]
            busy[i] += counters[0] - last[0]
            self.engine_steps += counters[1] - last[1]
            self.prefill_tokens += counters[2] - last[2]
            self.decode_tokens += counters[3] - last[3]
            if event.cached_tokens:
                self.cached_tokens = (self.cached_tokens or 0) + counters[4] - last[4]
        self._last = now
        self.usage.append((event.t, self.busy_s))
        self.instance_usage.append((event.t, tuple(busy)))

    # --- training ------

    def _training(self, event: ev.StepStarted | ev.Committed | ev.Loaded | ev.Published) -> None:
        match event:
            case ev.StepStarted():
                self._batch = (event.t, event.positions)
            case ev.Committed():
                self._commit(event)
            case ev.Loaded():
                self.load_s += event.io_s
            case ev.Published():
                self.version = event.version
                self.published.append((event.t, event.version, event.items))

    def _commit(self, event: ev.Committed) -> None:
        started = event.t if self._batch is None else self._batch[0]
        self._batch = None
        self.step = event.step
        self.trainer_spans.append((started, event.t))
        self.steps.append(
            StepRecord(
                step=event.step,
                started_s=started,
                committed_s=event.t,
                positions=event.positions,
                train_s=event.train_s,
                data_s=event.data_s,
                io_s=event.io_s,
                tokens=event.tokens,
                metrics=event.metrics,
            )
        )
        for position in event.positions:
            if item := self.items.get(position):
                item.committed, item.step = True, event.step

    # --- lives ------

    def _resume(self, event: ev.Resumed, died_s: float) -> None:
        self.resumed_s.append(event.t)
        self.ended = None
        if self._batch is not None:
            self.trainer_spans.append((self._batch[0], died_s))
        self._batch, self._sent, self._last = None, {}, []
        self.step, self.version = event.step, event.version
        self.steps = [s for s in self.steps if s.step <= event.step]
        states = [ItemState(s) for s in event.queue["states"]]
        parked = event.queue.get("parked", ())
        self.items = {p: item for p, item in self.items.items() if p < len(states)}
        for position, state in enumerate(states):
            item = self.items.get(position)
            if item is None:
                domain, submitted_s, finished_s = event.items.get(str(position), ("?", event.t, None))
                item = ItemRecord(position=position, domain=domain, submitted_s=submitted_s, finished_s=finished_s)
                self.items[position] = item
            item.back_to(state)
            item.committed = state in USED
            if position in parked:
                item.parked_s = event.t if item.parked_s is None else item.parked_s
            elif state not in USED and state is not ItemState.DEAD:
                item.parked_s = None
            if state is ItemState.DEAD and item.dead_s is None:
                item.dead_s = event.t
        self.items = dict(sorted(self.items.items()))
        self._head = 0
        self.heads.append((event.t, 0))
        self._move_head(event.t)

    # --- reading ------

    def consumed(self) -> list[ItemRecord]:
        """Items in durable weights, in position order."""
        return [item for item in self.items.values() if item.committed]

    def batches(self) -> list[list[ItemRecord]]:
        """The items of every committed step, in the order taken."""
        found = [[self.items[p] for p in s.positions if p in self.items] for s in self.steps]
        return [batch for batch in found if batch]


def fold(events: Iterable[ev.Event]) -> RunFold:
    """The records of a whole trace."""
    run = RunFold()
    for event in events:
        run.apply(event)
    return run
