"""The queue's laws (DESIGN section 2), checked on a trace without `forge.queue`: a second opinion on every run.

Written from the laws' text, so that a fault of the queue's own code shows here instead of repeating itself.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from forge import trace as ev
from forge.queue import QueueShape
from forge.types import DeathReason

KEEP = 100  # violations kept word for word; the rest are counted


@dataclass(slots=True)
class LawCheck:
    """Feed it every event in order; `violations` then says what broke, each with its time. `concurrency` is C."""

    shape: QueueShape
    concurrency: int
    instances: int
    overtakes_max: int = 0
    lag_steps: dict[int, int] = field(default_factory=dict)  # position -> steps its weights were behind, as trained
    broken: int = 0
    violations: list[str] = field(default_factory=list)
    _now: float = 0.0
    _state: list[str] = field(default_factory=list)
    _waiting: list[int] = field(default_factory=list)  # running or finished and not parked, ascending
    _parked: set[int] = field(default_factory=set)  # until they are committed or dead
    _ahead: int = 0  # items above the head that were taken
    _served: list[tuple[int, int | None]] = field(default_factory=list)  # items, steps in weights at submission
    _running: int = 0
    _taken: int = 0
    _dead: int = 0
    _forming: list[int] = field(default_factory=list)
    _batch: list[int] = field(default_factory=list)
    _committed: int = 0
    _published: int = 0
    _step: int = 0
    _published_step: int = 0
    _version: int = 0  # newest published one
    _versions: dict[int, int] = field(default_factory=dict)  # live instance -> version it serves

    def __post_init__(self) -> None:
        self._versions = dict.fromkeys(range(self.instances), 0)

    def apply(self, event: ev.Event) -> None:
        self._require(event.t >= self._now, f"time went back from {self._now:.3f}")
        self._now = max(self._now, event.t)
        match event:
            case ev.Submitted():
                self._submitted(event.position)
            case ev.Finished():
                self._become(event.position, "finished", "running")
            case ev.Dead():
                self._died(event)
            case ev.Taken():
                self._take(event)
            case ev.Parked():
                self._park(event.position)
            case ev.StepStarted() | ev.Committed():
                self._train(event)
            case ev.Published() | ev.Loaded() | ev.InstanceUp() | ev.InstanceDown():
                self._weights(event)
            case ev.Resumed():
                self._resume(event)
            case ev.RunEnded():
                self._ended(event)

    def _require(self, holds: bool, otherwise: str) -> None:
        if holds:
            return
        self.broken += 1
        if len(self.violations) < KEEP:
            self.violations.append(f"t={self._now:.3f}: {otherwise}")

    # --- items ------

    @property
    def _head(self) -> int:
        return self._waiting[0] if self._waiting else len(self._state)

    def _submitted(self, position: int) -> None:
        n = self.shape.n
        self._require_no_stale(f"submitted {position}")
        self._require(position == len(self._state), f"submitted {position}, but {len(self._state)} is next")
        if self.shape.window is not None:
            self._require(position < self._head + n, f"submitted {position} with head {self._head}: head + N reached")
        free = self._published + self._dead + n
        self._require(position < free, f"submitted {position}, but published + dead + N = {free}")
        while len(self._state) <= position:  # a gap is one violation, not one a position
            self._served.append((self._published, self._published_step))
            self._state.append("running")
            self._waiting.append(len(self._state) - 1)
            self._running += 1
        running = self._running
        self._require(running <= self.concurrency, f"{running} items run at once, concurrency is {self.concurrency}")

    def _become(self, position: int, state: str, *before: str) -> bool:
        known = 0 <= position < len(self._state)
        was = self._state[position] if known else "never submitted"
        self._require(was in before, f"item {position} became {state}, but it is {was}")
        if known:
            self._running -= was == "running"
            self._state[position] = state
        return was in before

    def _died(self, event: ev.Dead) -> None:
        position = event.position
        if not self._become(position, "dead", "running", "finished"):
            return
        self._dead += 1
        if position not in self._parked:
            self._leave(position)
            return
        self._parked.remove(position)
        behind = self._head - position
        early = event.reason == DeathReason.STALE and behind <= self.shape.park_reach
        self._require(not early, f"item {position} died stale, {behind} behind the head")

    def _park(self, position: int) -> None:
        self._require_no_stale(f"parked {position}")
        known = position == self._head < len(self._state)
        self._require(known, f"parked {position}, which is not the head {self._head}")
        if not known:
            return
        self._require(self._state[position] == "running", f"parked {position}, which is {self._state[position]}")
        waiting = sum(self._state[p] in ("running", "finished") for p in self._parked)
        most = self.shape.park_items
        self._require(waiting < most, f"parked {position} beside {waiting} others, at most {most} may be")
        self._leave(position)
        self._parked.add(position)

    def _require_no_stale(self, what: str) -> None:
        """A parked item dies before anything else happens once the head is more than X beyond it."""
        least = self._head - self.shape.park_reach
        stale = [p for p in self._parked if p < least and self._state[p] in ("running", "finished")]
        self._require(not stale, f"{what} while {stale} should have died stale")

    def _take(self, event: ev.Taken) -> None:
        position, window, head = event.position, self.shape.window, self._head
        self._require_no_stale(f"took {position}")
        if not self._become(position, "taken", "finished"):
            return
        parked = position in self._parked
        if window is not None and not parked:
            inside = head <= position < head + window
            self._require(inside, f"took {position} outside the window [{head}, {head + window - 1}]")
        lag = self._taken - self._served[position][0]
        self._require(lag == event.lag_items, f"item {position} has lag {lag}, the trace says {event.lag_items}")
        if window is not None:
            bound = self._bound(position, window)
            self._require(lag <= bound, f"item {position} has lag {lag} items, above the bound {bound}")
        self._taken += 1
        self._forming.append(position)
        if not parked:
            self._overtake(position, head, window)

    def _bound(self, position: int, window: int) -> int:
        """N + W - 2 items of lag, and X more of a parked item."""
        return self.shape.n + window - 2 + (self.shape.park_reach if position in self._parked else 0)

    def _overtake(self, position: int, head: int, window: int | None) -> None:
        """Of items not parked: who has stepped aside is overtaken by as many as its lag allows."""
        passed = self._leave(position)
        self._ahead += passed > 0
        self.overtakes_max = max(self.overtakes_max, passed)
        if window is not None:
            most = window - 1
            self._require(passed <= most, f"item {position} overtook {passed} others, more than {most}")
            # Nobody was overtaken by more than the head was.
            self._require(self._ahead <= most, f"item {head} was overtaken by {self._ahead} others, more than {most}")

    def _leave(self, position: int) -> int:
        """It waits no more; returns how many below it do."""
        below = bisect_left(self._waiting, position)
        del self._waiting[below]
        if not below:
            self._ahead -= self._taken_in(position + 1, self._head)
        return below

    def _taken_in(self, low: int, high: int) -> int:
        return sum(self._state[p] in ("taken", "committed") for p in range(low, high))

    # --- training and weights ------

    def _train(self, event: ev.StepStarted | ev.Committed) -> None:
        positions = list(event.positions)
        self._require(event.step == self._step + 1, f"step {event.step} after step {self._step}")
        if isinstance(event, ev.Committed):
            self._require(positions == self._batch, f"committed {positions}, in training were {self._batch}")
            for position in positions:
                self._become(position, "committed", "taken")
                self._parked.discard(position)
            self._step, self._batch = event.step, []
            self._committed += len(positions)
            return
        self._require_no_stale(f"started step {event.step}")
        self._require(not self._batch, f"step {event.step} started while {self._batch} are in training")
        self._require(positions == self._forming, f"step {event.step} trains {positions}, taken were {self._forming}")
        full = len(positions) == self.shape.batch
        self._require(full or event.partial, f"step {event.step} has {len(positions)} of {self.shape.batch} items")
        self._batch, self._forming = positions, []
        for position in positions:
            self._lag_in_steps(position, event.step)

    def _lag_in_steps(self, position: int, step: int) -> None:
        if not 0 <= position < len(self._served) or self._served[position][1] is None:
            return
        lag = step - 1 - (self._served[position][1] or 0)
        self.lag_steps[position] = lag
        if self.shape.window is not None:
            bound = self._bound(position, self.shape.window) // self.shape.batch
            self._require(lag <= bound, f"item {position} has lag {lag} steps, above the bound {bound}")

    def _weights(self, event: ev.Published | ev.Loaded | ev.InstanceUp | ev.InstanceDown) -> None:
        match event:
            case ev.Loaded():
                self._versions[event.instance] = event.version
            case ev.InstanceUp():
                fresh = event.version >= self._version
                self._require(fresh, f"instance {event.instance} came up with {event.version}, not {self._version}")
                self._versions[event.instance] = event.version
            case ev.InstanceDown():
                self._versions.pop(event.instance, None)
            case ev.Published():
                slowest = min(self._versions.values(), default=event.version)
                self._require(slowest >= event.version, f"published {event.version}, but {slowest} is still served")
                self._require(event.items >= self._published, f"published {event.items} after {self._published} items")
                self._require(
                    event.items <= self._committed, f"published {event.items} items, {self._committed} are committed"
                )
                self._published, self._published_step, self._version = event.items, event.step, event.version

    # --- lives ------

    def _resume(self, event: ev.Resumed) -> None:
        states = [s if s != "published" else "committed" for s in event.queue["states"]]
        known = self._served[: len(states)]
        # The step served to an item this trace never saw submitted is lost; its items are in the pool.
        self._served = known + [(int(items), None) for items in event.queue["served"][len(known) :]]
        self._state = states
        self._parked = set(event.queue.get("parked", ()))
        waiting = [p for p, s in enumerate(states) if s in ("running", "finished")]
        self._waiting = [p for p in waiting if p not in self._parked]
        self._ahead = self._taken_in(self._head + 1, len(states))
        self._running, self._dead = states.count("running"), states.count("dead")
        self._committed = self._taken = states.count("committed")
        self._require("taken" not in states, "resumed with items taken but not committed")
        self._forming, self._batch = [], []
        self._published, self._step = int(event.queue["published"]), event.step
        self._published_step, self._version = event.published_step, event.version
        self._versions = dict.fromkeys(range(self.instances), event.version)

    def _ended(self, event: ev.RunEnded) -> None:
        if event.reason != "done":
            return
        left = [p for p, state in enumerate(self._state) if state not in ("committed", "dead")]
        self._require(not left, f"the run ended as done with items {left[:8]} neither trained nor dead")
        behind = self._committed - self._published
        self._require(behind == 0, f"the run ended as done with {behind} committed items never published")
