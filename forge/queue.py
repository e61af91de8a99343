"""The generation queue: item states, admission, visibility, commit and publication (DESIGN section 2).

One pure state machine without clock or I/O. The pool makes it durable, the simulator runs it in virtual time, and
the trace fold rebuilds it; all three are this class. Every method either makes one legal move or raises
`QueueError` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forge.types import ForgeError, ItemState

WAITING = (ItemState.RUNNING, ItemState.FINISHED)


class QueueError(Exception):
    """An illegal move. A driver that gets one has a bug, or its decider asked for what the laws forbid."""


def window_size(fraction: float, n: int) -> int:
    """W = min(N, max(1, floor(f*N + 1e-9))); the 1e-9 keeps 0.3*10 at 3 in binary floating point."""
    return min(n, max(1, int(fraction * n + 1e-9)))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShape:
    """The queue's numbers, all counted in items. `window` None is fffo: no window and no head rule.

    The straggler escape: `park_items` (E) running heads may be parked at a time, and one dies stale once the head is
    more than `park_reach` (X) positions beyond it. 0 parked items: off.

    Raises ForgeError where the numbers would deadlock (k*P > N - E) or make no sense.
    """

    n: int
    batch: int
    window: int | None
    publish_every: int = 1
    park_items: int = 0
    park_reach: int = 0

    def __post_init__(self) -> None:
        for key, value in (("n", self.n), ("batch", self.batch), ("publish_every", self.publish_every)):
            if value < 1:
                raise ForgeError(f"queue.{key} = {value}: must be at least 1")
        if self.window is not None and not 1 <= self.window <= self.n:
            raise ForgeError(f"window = {self.window}: must lie in [1, queue.n = {self.n}]")
        if self.park_items:
            self._check_escape()
        if self.publish_every * self.batch > self.n - self.park_items:
            parked = f" - policy.scheduler.park_items = {self.park_items}" if self.park_items else ""
            raise ForgeError(
                f"queue would deadlock: publish every {self.publish_every} steps x queue.batch = {self.batch} items "
                f"= {self.publish_every * self.batch} > queue.n = {self.n}{parked}; raise queue.n or lower the others"
            )

    def _check_escape(self) -> None:
        if self.window is None:
            raise ForgeError(f"park_items = {self.park_items}: without a window no head holds anything up")
        if self.park_items < 0:
            raise ForgeError(f"park_items = {self.park_items}: must be at least 0")
        if self.park_reach < 1:
            raise ForgeError(f"park_reach = {self.park_reach}: must be at least 1 where park_items is not 0")

    @property
    def ordinary_lag_bound(self) -> int | None:
        """N + W - 2, the largest possible lag of an item never parked (DESIGN section 2); None without a window."""
        return None if self.window is None else self.n + self.window - 2

    @property
    def lag_items_bound(self) -> int | None:
        """The largest possible lag of any item: X more than an ordinary one's where items may be parked."""
        bound = self.ordinary_lag_bound
        return bound + self.park_reach if bound is not None and self.park_items else bound

    @property
    def lag_steps_bound(self) -> int | None:
        bound = self.lag_items_bound
        return None if bound is None else bound // self.batch


class ItemQueue:
    """Positions 0, 1, 2, ... and what became of each. O(1) per move except `die` and `take`, which move the head."""

    def __init__(self, shape: QueueShape) -> None:
        self.shape = shape
        self.states: list[ItemState] = []
        self.head = 0  # lowest position neither taken nor dead nor parked
        self.taken = 0  # items ever taken, rolled-back ones not counted
        self.dead = 0
        self.published = 0
        self.committed: list[int] = []  # positions in commit order; the first `published` of them are published
        self.forming: list[int] = []  # taken, waiting for the batch to fill
        self.training: list[int] = []  # taken, in the trainer
        self.finished_order: list[int] = []  # finished and not yet taken, in finishing order
        self.parked: set[int] = set()  # those of the waiting and taken ones that were parked
        self._served: list[int] = []  # per position: items in the weights served when it was submitted

    def __len__(self) -> int:
        return len(self.states)

    # --- admission ------

    def may_submit(self) -> bool:
        """Position j is admitted iff j < head + N and j < published + dead + N. Fffo has no head rule."""
        j, n = len(self.states), self.shape.n
        in_head = self.shape.window is None or j < self.head + n
        return in_head and j < self.published + self.dead + n

    def submit(self) -> int:
        """Give out the next position."""
        if not self.may_submit():
            raise QueueError(f"position {len(self.states)} is not admitted")
        self.states.append(ItemState.RUNNING)
        self._served.append(self.published)
        return len(self.states) - 1

    # --- the rollout side ------

    def finish(self, position: int) -> None:
        self._expect(position, ItemState.RUNNING)
        self.states[position] = ItemState.FINISHED
        self.finished_order.append(position)

    def die(self, position: int) -> None:
        """A running or finished item ends unused; it frees its slot at once."""
        self._expect(position, *WAITING)
        if self.states[position] is ItemState.FINISHED:
            self.finished_order.remove(position)
        self.states[position] = ItemState.DEAD
        self.dead += 1
        self.parked.discard(position)
        self._move_head()

    # --- the straggler escape ------

    def may_park(self) -> bool:
        """Whether the head could step aside: it runs, and fewer than E parked items wait."""
        limit = self.shape.park_items
        if not limit or self.head == len(self.states) or self.states[self.head] is not ItemState.RUNNING:
            return False
        return sum(self.states[p] in WAITING for p in self.parked) < limit

    def park(self, position: int) -> None:
        """The running head steps aside: it keeps its slot, may be taken whenever it finishes, and holds nobody up."""
        self._expect(position, ItemState.RUNNING)
        if position != self.head or not self.may_park():
            raise QueueError(
                f"position {position} cannot be parked at head {self.head}, with {len(self.parked)} parked"
            )
        self.parked.add(position)
        self._move_head()

    def stale(self) -> list[int]:
        """Parked items that the head left more than X positions behind: they must die before anything else happens."""
        last = self.head - self.shape.park_reach
        return sorted(p for p in self.parked if p < last and self.states[p] in WAITING)

    # --- the training side ------

    def is_visible(self, position: int) -> bool:
        """Inside [head, head + W - 1], or parked and not stale; without a window everything is visible."""
        window = self.shape.window
        if position in self.parked:
            return self.head - position <= self.shape.park_reach
        return window is None or self.head <= position < self.head + window

    def lag_if_taken(self, position: int) -> int:
        """Items taken before it minus items in the weights served when it was submitted."""
        self._expect(position, ItemState.FINISHED)
        return self.taken - self._served[position]

    def take(self, position: int) -> int:
        """Take one visible finished item into the forming batch. Returns its lag in items."""
        lag = self.lag_if_taken(position)
        if not self.is_visible(position):
            raise QueueError(f"position {position} is outside the window at head {self.head}")
        if len(self.forming) >= self.shape.batch:
            raise QueueError(f"position {position}: the forming batch is full")
        self.states[position] = ItemState.TAKEN
        self.finished_order.remove(position)
        self.forming.append(position)
        self.taken += 1
        self._move_head()
        return lag

    def start_step(self, *, partial: bool = False) -> list[int]:
        """Hand the forming batch to the trainer. `partial` is for the end of work only."""
        if self.training:
            raise QueueError("the trainer is busy")
        if not self.forming or (len(self.forming) < self.shape.batch and not partial):
            raise QueueError(f"{len(self.forming)} of {self.shape.batch} items taken")
        self.training, self.forming = self.forming, []
        return list(self.training)

    def commit(self) -> list[int]:
        """The checkpoint that contains the training batch is durable."""
        if not self.training:
            raise QueueError("nothing is in training")
        done, self.training = self.training, []
        for position in done:
            self.states[position] = ItemState.COMMITTED
        self.committed.extend(done)
        self.parked.difference_update(done)
        return done

    def publish(self, count: int) -> None:
        """The slowest live engine serves weights that contain the first `count` committed items."""
        if not self.published <= count <= len(self.committed):
            raise QueueError(f"cannot publish {count}: {self.published} published, {len(self.committed)} committed")
        for position in self.committed[self.published : count]:
            self.states[position] = ItemState.PUBLISHED
        self.published = count

    def roll_back(self) -> list[int]:
        """On resume: items taken but not committed return to their positions as finished, in taken order.

        The head returns to the first of them. What was parked beyond it is ordinary again: nothing that the rollback
        leaves taken had passed it.
        """
        lost = self.training + self.forming
        self.training, self.forming = [], []
        for position in lost:
            self.states[position] = ItemState.FINISHED
        self.finished_order.extend(lost)
        self.taken -= len(lost)
        self.head = min([self.head, *(p for p in lost if p not in self.parked)])
        self.parked = {p for p in self.parked if p < self.head}
        return lost

    # --- reading ------

    def waiting(self) -> list[int]:
        """Positions running or finished, ascending: parked ones, then from the head on."""
        return [p for p in (*sorted(self.parked), *range(self.head, len(self.states))) if self.states[p] in WAITING]

    def counts(self) -> dict[ItemState, int]:
        return {state: self.states.count(state) for state in ItemState}

    @property
    def running(self) -> int:
        return len(self.states) - self.dead - self.taken - len(self.finished_order)

    @property
    def open_items(self) -> int:
        """Items not yet dead or committed: what is left to do before the run may end."""
        return len(self.states) - self.dead - len(self.committed)

    def to_dict(self) -> dict[str, object]:
        """Everything needed to go on, JSON-serialisable."""
        return {
            "states": [s.value for s in self.states],
            "served": list(self._served),
            "committed": list(self.committed),
            "published": self.published,
            "finished_order": list(self.finished_order),
            "forming": list(self.forming),
            "training": list(self.training),
            "parked": sorted(self.parked),
        }

    @classmethod
    def from_dict(cls, shape: QueueShape, data: dict[str, object]) -> ItemQueue:
        """Inverse of `to_dict`. Raises QueueError where the parts contradict each other."""
        queue = cls(shape)
        queue.states = [ItemState(s) for s in _strings(data["states"])]
        queue._served = _ints(data["served"])
        queue.committed = _ints(data["committed"])
        queue.published = _ints([data["published"]])[0]
        queue.finished_order = _ints(data["finished_order"])
        queue.forming = _ints(data["forming"])
        queue.training = _ints(data["training"])
        queue.parked = set(_ints(data.get("parked", ())))  # absent in traces from before the escape
        queue.dead = queue.states.count(ItemState.DEAD)
        queue.taken = len(queue.committed) + len(queue.forming) + len(queue.training)
        queue._move_head()
        queue._check()
        return queue

    def _check(self) -> None:
        states = self.states
        listed = self.forming + self.training + self.finished_order + self.committed
        if len(self._served) != len(states) or len(set(listed)) != len(listed):
            raise QueueError("contradictory queue: an item listed twice, or a length that differs")
        want = {
            ItemState.TAKEN: set(self.forming + self.training),
            ItemState.FINISHED: set(self.finished_order),
            ItemState.COMMITTED: set(self.committed[self.published :]),
            ItemState.PUBLISHED: set(self.committed[: self.published]),
        }
        for state, positions in want.items():
            if {p for p, s in enumerate(states) if s is state} != positions:
                raise QueueError(f"contradictory queue: {state} items")
        unparked = [p for p in self.parked if not (p < self.head and states[p] in (*WAITING, ItemState.TAKEN))]
        if unparked:
            raise QueueError(f"contradictory queue: parked items {unparked[:8]}")

    def _expect(self, position: int, *states: ItemState) -> None:
        if not 0 <= position < len(self.states):
            raise QueueError(f"position {position} was never submitted")
        if self.states[position] not in states:
            raise QueueError(f"position {position} is {self.states[position]}, not {' or '.join(states)}")

    def _move_head(self) -> None:
        while self.head < len(self.states) and (self.states[self.head] not in WAITING or self.head in self.parked):
            self.head += 1


def _ints(values: object) -> list[int]:
    assert isinstance(values, Sequence)
    return [int(v) for v in values]


def _strings(values: object) -> list[str]:
    assert isinstance(values, Sequence)
    return [str(v) for v in values]
