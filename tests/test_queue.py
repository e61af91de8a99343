"""The laws of the queue (DESIGN section 2): for arbitrary drivers, exhaustively in small cases, and their controls."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forge.queue import ItemQueue, QueueError, QueueShape, window_size
from forge.types import ForgeError, ItemState

WAITING = (ItemState.RUNNING, ItemState.FINISHED)


def shape_outside(n: int, batch: int, window: int | None, publish_every: int, park: tuple[int, int]) -> QueueShape:
    """A shape that the validity condition refuses, made behind its back."""
    shape = object.__new__(QueueShape)
    numbers = {"n": n, "batch": batch, "window": window, "publish_every": publish_every}
    for key, value in {**numbers, "park_items": park[0], "park_reach": park[1]}.items():
        object.__setattr__(shape, key, value)
    return shape


# --- any driver ------


class AnyDriver(RuleBasedStateMachine):
    """Every legal move in every order, resumes included, against books kept here independently."""

    @initialize(data=st.data(), n=st.integers(1, 9))
    def begin(self, data: st.DataObject, n: int) -> None:
        batch = data.draw(st.integers(1, n))
        window = data.draw(st.none() | st.integers(1, n))
        k = data.draw(st.integers(1, n // batch))
        most = n - k * batch if window is not None else 0
        park, reach = data.draw(st.integers(0, most)), data.draw(st.integers(1, n + 2))
        self.shape = QueueShape(
            n=n, batch=batch, window=window, publish_every=k, park_items=park, park_reach=reach if park else 0
        )
        self.queue = ItemQueue(self.shape)
        self.state: list[str] = []
        self.served: list[tuple[int, int]] = []  # items and steps in the weights at submission
        self.taken: list[int] = []  # in order, without what was rolled back
        self.batches: list[int] = []  # sizes committed
        self.steps_published = 0
        self.published = 0
        self.passed_by: dict[int, set[int]] = {}
        self.parked: set[int] = set()

    # books

    @property
    def head(self) -> int:
        waiting = (p for p in self.of("running", "finished") if p not in self.parked)
        return next(waiting, len(self.state))

    @property
    def stale(self) -> list[int]:
        """Parked and waiting, more than X behind the head. No other move may come before their deaths."""
        waiting = self.of("running", "finished")
        return [p for p in waiting if p in self.parked and self.head - p > self.shape.park_reach]

    def of(self, *states: str) -> list[int]:
        return [p for p, s in enumerate(self.state) if s in states]

    def visible(self, position: int) -> bool:
        window = self.shape.window
        if position in self.parked:
            return self.head - position <= self.shape.park_reach
        return window is None or self.head <= position <= self.head + window - 1

    # moves

    def bury_stale(self) -> None:
        """As a driver must, after every move that may move the head."""
        while self.stale:
            assert self.queue.stale() == self.stale
            for position in self.stale:
                with pytest.raises(QueueError):
                    self.queue.take(position)
                self.bury(position)
        assert self.queue.stale() == []

    def bury(self, position: int) -> None:
        self.queue.die(position)
        self.state[position] = "dead"
        self.parked.discard(position)

    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        """The running head, while fewer than E wait parked; anything else is refused."""
        position = data.draw(st.sampled_from([self.head, *self.of("running", "finished")]))
        waiting = sum(self.state[p] in ("running", "finished") for p in self.parked)
        runs = position == self.head < len(self.state) and self.state[position] == "running"
        assert self.queue.may_park() == (self.head in self.of("running") and waiting < self.shape.park_items)
        if not runs or waiting >= self.shape.park_items:
            before = self.queue.to_dict()
            with pytest.raises(QueueError):
                self.queue.park(position)
            assert self.queue.to_dict() == before
            return
        self.queue.park(position)
        self.parked.add(position)
        self.bury_stale()

    @rule(tries=st.integers(1, 4))
    def submit(self, tries: int) -> None:
        for _ in range(tries):
            j, n = len(self.state), self.shape.n
            free = j < self.published + len(self.of("dead")) + n
            allowed = free and (self.shape.window is None or j < self.head + n)
            assert self.queue.may_submit() == allowed
            if not allowed:
                with pytest.raises(QueueError):
                    self.queue.submit()
                return
            assert self.queue.submit() == j
            self.state.append("running")
            self.served.append((self.published, self.steps_published))

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(self.of("running")))
        self.queue.finish(position)
        self.state[position] = "finished"

    @precondition(lambda self: self.of("running", "finished"))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(self.of("running", "finished")))
        full = not self.queue.may_submit() and len(self.state) < self.head + self.shape.n
        self.bury(position)
        if full:
            assert self.queue.may_submit(), "a dead item frees its slot at once"
        self.bury_stale()

    @precondition(lambda self: self.of("finished"))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(self.of("finished")))
        before = self.queue.to_dict()
        if not self.visible(position) or len(self.queue.forming) == self.shape.batch:
            with pytest.raises(QueueError):
                self.queue.take(position)
            assert self.queue.to_dict() == before
            return
        lag = self.queue.take(position)
        assert lag == len(self.taken) - self.served[position][0]
        passed = [q for q in self.of("running", "finished") if q < position and q not in self.parked]
        for q in passed:
            self.passed_by.setdefault(q, set()).add(position)
        if self.shape.window is not None:
            assert lag <= self.lag_bound(position)
            assert len(passed) <= self.shape.window - 1, "overtakes at most W - 1"
            assert all(len(self.passed_by[q]) <= self.shape.window - 1 for q in passed), "overtaken by at most W - 1"
            assert not (passed and position in self.parked), "a parked item is below the head"
        self.state[position] = "taken"
        self.taken.append(position)
        self.bury_stale()

    def lag_bound(self, position: int) -> int:
        assert self.shape.window is not None
        reach = self.shape.park_reach if position in self.parked else 0
        return self.shape.n + self.shape.window - 2 + reach

    @precondition(lambda self: self.of("finished", "running"))
    @rule(data=st.data())
    def refuse_the_impossible(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(-1, len(self.state) + 1))
        if 0 <= position < len(self.state) and self.state[position] == "finished":
            return
        before = self.queue.to_dict()
        with pytest.raises(QueueError):
            self.queue.take(position)
        assert self.queue.to_dict() == before

    @rule()
    def start(self) -> None:
        if self.queue.training or len(self.queue.forming) < self.shape.batch:
            with pytest.raises(QueueError):
                self.queue.start_step()
            return
        batch = self.queue.start_step()
        assert batch == self.taken[-self.shape.batch :]
        if self.shape.window is not None:
            for p in batch:
                assert len(self.batches) - self.served[p][1] <= self.lag_bound(p) // self.shape.batch

    @precondition(lambda self: self.queue.training)
    @rule()
    def commit(self) -> None:
        done = self.queue.commit()
        self.batches.append(len(done))
        for position in done:
            self.state[position] = "committed"
        self.parked.difference_update(done)

    @precondition(lambda self: self.steps_published < len(self.batches))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.steps_published = data.draw(st.integers(self.steps_published + 1, len(self.batches)))
        self.published = sum(self.batches[: self.steps_published])
        self.queue.publish(self.published)
        for position in self.taken[: self.published]:
            self.state[position] = "published"

    @rule()
    def crash_and_resume(self) -> None:
        self.queue = ItemQueue.from_dict(self.shape, json.loads(json.dumps(self.queue.to_dict())))
        lost = self.queue.roll_back()
        assert sorted(lost) == self.of("taken")
        for position in lost:
            self.state[position] = "finished"
            self.taken.remove(position)
            for passed in self.passed_by.values():
                passed.discard(position)
        first = min((p for p in self.of("running", "finished") if p not in self.parked), default=len(self.state))
        self.parked = {p for p in self.parked if p < first}  # beyond the head that it returns to: ordinary again
        again = ItemQueue.from_dict(self.shape, json.loads(json.dumps(self.queue.to_dict())))
        assert again.to_dict() == self.queue.to_dict()
        assert (again.head, again.taken, again.dead) == (self.queue.head, self.queue.taken, self.queue.dead)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert [s.value for s in self.queue.states] == self.state
        assert self.queue.head == self.head
        assert self.queue.parked == self.parked
        assert not self.stale
        assert self.queue.taken == len(self.taken)
        assert self.queue.running == len(self.of("running"))
        assert self.queue.waiting() == self.of("running", "finished")
        assert self.queue.open_items == len(self.of("running", "finished", "taken"))
        assert sum(self.queue.counts().values()) == len(self.state), "every item is in one state"
        assert all(self.queue.is_visible(p) == self.visible(p) for p in self.of("running", "finished"))


TestAnyDriver = AnyDriver.TestCase
TestAnyDriver.settings = settings(max_examples=60, stateful_step_count=50)


# --- every small case ------


class Searched(ItemQueue):
    """A queue the search can branch and forget the past of. `held` dead items have not freed their slots."""

    rule = "design"  # or "no publication rule", "dead held", "parked for ever"
    held = 0
    steps = 0  # since publication

    def may_submit(self) -> bool:
        j, n = len(self.states), self.shape.n
        if self.rule == "no publication rule":
            return self.shape.window is None or j < self.head + n
        if self.rule == "dead held":
            return j < self.head + n and j < self.published + self.dead - self.held + n
        return super().may_submit()

    def die(self, position: int) -> None:
        super().die(position)
        self.held += self.rule == "dead held"

    @property
    def aside(self) -> list[int]:
        """Parked and not yet taken."""
        return [p for p in sorted(self.parked) if self.states[p] in WAITING]

    @property
    def first(self) -> int:
        """Below it no position matters any more."""
        return min([self.head, *self.aside])

    def branch(self, *, with_lag: bool) -> Searched:
        """A copy without the items that no longer matter: published or dead, and below the head if that has a say."""
        below = self.first if self.shape.window is not None else len(self.states)
        over = [p for p in range(below) if self.states[p] in (ItemState.PUBLISHED, ItemState.DEAD)]
        gone = set(over)
        published = sum(self.states[p] is ItemState.PUBLISHED for p in over)
        number = {p: i for i, p in enumerate(q for q in range(len(self.states)) if q not in gone)}

        def renumber(positions: list[int]) -> list[int]:
            return [number[p] for p in positions if p in number]

        committed = self.committed
        copy = type(self).from_dict(
            self.shape,
            {
                "states": [self.states[p].value for p in number],
                "served": [self._served[p] - published if with_lag else 0 for p in number],
                "committed": sorted(renumber(committed[: self.published])) + renumber(committed[self.published :]),
                "published": self.published - published,
                "finished_order": sorted(renumber(self.finished_order)),
                "forming": sorted(renumber(self.forming)),
                "training": sorted(renumber(self.training)),
                "parked": renumber(self.aside),
            },
        )
        assert isinstance(copy, Searched)
        copy.rule, copy.held, copy.steps = self.rule, self.held, self.steps
        return copy

    def key(self) -> tuple[object, ...]:
        waiting = [s.value if s in WAITING else "-" for s in self.states[self.first :]]
        if self.shape.window is None:
            waiting = sorted(w for w in waiting if w != "-")
        served = [self.taken - self._served[p] for p in self.waiting()]
        credit = self.published + self.dead - self.held - len(self.states)
        unpublished = len(self.committed) - self.published
        behind = [self.head - p for p in self.aside]
        trained = (len(self.forming), len(self.training), unpublished, self.steps)
        return (*waiting, credit, *served, *trained, *behind)

    def moves(self) -> Iterator[tuple[str, int]]:
        """What the world or a driver may do next: rollouts end or die in any order, takes are any visible item."""
        if stale := self.stale():
            yield "die", stale[0]
            return
        if self.may_submit():
            yield "submit", 0
        if self.may_park():
            yield "park", self.head
        for position in self.waiting():
            if self.rule == "parked for ever" and position in self.parked:
                continue
            yield "die", position
            if self.states[position] is ItemState.RUNNING:
                yield "finish", position
            elif self.is_visible(position) and len(self.forming) < self.shape.batch:
                yield "take", position
        if self.training:
            yield "commit", 0
        elif len(self.forming) == self.shape.batch:
            yield "start", 0
        if self.steps >= self.shape.publish_every:
            yield "publish", 0

    def move(self, name: str, position: int) -> int:
        """Returns the lag of a take, else 0."""
        match name:
            case "submit":
                self.submit()
            case "finish":
                self.finish(position)
            case "die":
                self.die(position)
            case "park":
                self.park(position)
            case "take":
                return self.take(position)
            case "start":
                self.start_step()
            case "commit":
                self.commit()
                self.steps += 1
            case "publish":
                self.publish(len(self.committed))
                self.steps = self.held = 0
        return 0


def search(shape: QueueShape, rule: str = "design", *, with_lag: bool = False) -> tuple[int, bool, int]:
    """Every state reachable: how many, whether one of them is stuck, and the largest lag of a take."""
    first = Searched(shape)
    first.rule = rule
    seen, todo, largest, stuck = {first.key()}, [first], 0, False
    while todo:
        queue = todo.pop()
        moves = list(queue.moves())
        stuck = stuck or not moves
        for name, position in moves:  # positions are as in the branch: `queue` is one itself
            after = queue.branch(with_lag=with_lag)
            largest = max(largest, after.move(name, position))
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after.branch(with_lag=with_lag))
    return len(seen), stuck, largest


CASES = [
    (n, batch, window, k)
    for n in range(1, 5)
    for window in [None, *range(1, n + 1)]
    for batch in range(1, 5)
    for k in (1, 2)
]


@pytest.mark.parametrize(("n", "batch", "window", "k"), [c for c in CASES if c[3] * c[1] <= c[0]])
def test_no_deadlock_under_the_validity_condition(n: int, batch: int, window: int | None, k: int) -> None:
    states, stuck, _ = search(QueueShape(n=n, batch=batch, window=window, publish_every=k))
    assert states > n
    assert not stuck


@pytest.mark.parametrize(("n", "batch", "window", "k"), [c for c in CASES if c[3] * c[1] > c[0]])
def test_a_deadlock_outside_it_and_the_shape_is_refused(n: int, batch: int, window: int | None, k: int) -> None:
    _, stuck, _ = search(shape_outside(n, batch, window, k, (0, 0)))
    assert stuck
    with pytest.raises(ForgeError, match="deadlock"):
        QueueShape(n=n, batch=batch, window=window, publish_every=k)


@pytest.mark.parametrize(("n", "window"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_the_lag_bound_holds_in_every_state_and_is_reached(n: int, window: int) -> None:
    shape = QueueShape(n=n, batch=1, window=window)
    assert search(shape, with_lag=True)[2] == n + window - 2 == shape.lag_items_bound


ESCAPES = [(n, batch, window, k, e, x) for n, batch, window, k in CASES for e in (1, 2) for x in (1, n)]
ESCAPES = [c for c in ESCAPES if c[0] <= 3 and c[2] is not None]


@pytest.mark.parametrize(("n", "batch", "window", "k", "park", "reach"), [c for c in ESCAPES if c[1] * c[3] <= c[0]])
def test_stragglers_that_never_end_deadlock_only_outside_the_validity_condition(
    n: int, batch: int, window: int, k: int, park: int, reach: int
) -> None:
    """Parked items here neither finish nor die of themselves: only the condition keeps slots for the others. (With X
    below N some deadlocks outside it are broken by a death; the condition does not count on that.)"""
    numbers = {"n": n, "batch": batch, "window": window, "publish_every": k}
    valid = k * batch <= n - park
    shape = shape_outside(n, batch, window, k, (park, reach))
    stuck = search(shape, "parked for ever")[1]
    assert not stuck if valid else stuck or reach < n
    if valid:
        assert QueueShape(**numbers, park_items=park, park_reach=reach) == shape
        return
    with pytest.raises(ForgeError, match=rf"queue\.n = {n} - policy\.scheduler\.park_items = {park}; raise queue\.n"):
        QueueShape(**numbers, park_items=park, park_reach=reach)


@pytest.mark.parametrize(("n", "window", "reach"), [(2, 1, 1), (2, 1, 3), (2, 2, 4), (3, 1, 2), (3, 2, 3)])
def test_the_lag_bounds_hold_in_every_state_with_parked_items(n: int, window: int, reach: int) -> None:
    """A parked item's, N + W - 2 + X, is reached but for one: the head that is X beyond it is not taken itself. (A
    window is no wider than the slots that are left.)"""
    shape = QueueShape(n=n, batch=1, window=window, park_items=1, park_reach=reach)
    largest = search(shape, with_lag=True)[2]
    assert largest == max(n + window - 2, n + min(window, n - 1) - 3 + reach) <= (shape.lag_items_bound or 0)


def test_freeing_dead_slots_only_on_publication_deadlocks() -> None:
    shape = QueueShape(n=2, batch=2, window=2)
    assert not search(shape)[1]
    assert search(shape, "dead held")[1]


# --- the constructed schedules ------


def train(queue: ItemQueue, *, publish: bool = True) -> None:
    queue.start_step()
    queue.commit()
    if publish:
        queue.publish(len(queue.committed))


def test_eight_and_four_reach_a_lag_of_exactly_ten() -> None:
    queue = ItemQueue(QueueShape(n=8, batch=2, window=4))
    for _ in range(8):
        queue.submit()
    for position in range(7):  # all but the last, submitted under version 0
        queue.finish(position)
        queue.take(position)
        if len(queue.forming) == 2:
            train(queue)
    for _ in range(3):
        position = queue.submit()
        queue.finish(position)
        if len(queue.forming) == 2:
            train(queue)
        queue.take(position)  # three overtake it: W - 1
    queue.finish(7)
    if len(queue.forming) == 2:
        train(queue)
    assert queue.take(7) == 10 == queue.shape.lag_items_bound
    assert queue.shape.lag_steps_bound == 5


def test_without_the_publication_rule_the_same_numbers_reach_fourteen() -> None:
    """Batches of 2: two items form and two train, unpublished, when item 11 is submitted with the head at 4."""
    queue = Searched(QueueShape(n=8, batch=2, window=4))
    queue.rule = "no publication rule"
    for _ in range(8):
        queue.submit()
    for position in range(4):
        queue.finish(position)
        queue.take(position)
        if position == 1:
            queue.start_step()
    for _ in range(4):
        queue.submit()  # up to 11; published is still 0, which the rule would have refused at 8
    queue.commit()
    queue.publish(2)
    train(queue)
    for position in [*range(4, 11)]:
        queue.finish(position)
        queue.take(position)
        if len(queue.forming) == 2:
            train(queue)
    for position in (12, 13, 14):
        assert queue.submit() == position
        queue.finish(position)
        queue.take(position)
        if len(queue.forming) == 2:
            train(queue)
    queue.finish(11)
    assert queue.take(11) == 14 > (queue.shape.lag_items_bound or 0)
    honest = ItemQueue(queue.shape)
    for _ in range(8):
        honest.submit()
    for position in range(4):
        honest.finish(position)
        honest.take(position)
        if position == 1:
            honest.start_step()
    assert not honest.may_submit()


# --- numbers and refusals ------


@pytest.mark.parametrize(
    ("fraction", "n", "window"), [(0.3, 10, 3), (0.3, 32, 9), (0.01, 8, 1), (1.0, 8, 8), (0.29999, 10, 2), (0.7, 10, 7)]
)
def test_window_size(fraction: float, n: int, window: int) -> None:
    assert window_size(fraction, n) == window


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"n": 0, "batch": 1, "window": 1}, "queue.n = 0"),
        ({"n": 4, "batch": 0, "window": 1}, "queue.batch = 0"),
        ({"n": 4, "batch": 1, "window": 5}, "window = 5"),
        ({"n": 4, "batch": 1, "window": 0}, "window = 0"),
        ({"n": 4, "batch": 2, "window": 1, "publish_every": 3}, "deadlock"),
        ({"n": 4, "batch": 4, "window": 1, "park_items": 1, "park_reach": 1}, "deadlock"),
        ({"n": 4, "batch": 2, "window": 1, "park_items": 1}, "park_reach = 0"),
        ({"n": 4, "batch": 2, "window": 1, "park_items": -1, "park_reach": 1}, "park_items = -1"),
        ({"n": 4, "batch": 2, "window": None, "park_items": 1, "park_reach": 1}, "without a window"),
    ],
)
def test_impossible_shapes_are_refused(numbers: dict[str, int], message: str) -> None:
    with pytest.raises(ForgeError, match=message):
        QueueShape(**numbers)


def test_a_partial_batch_trains_only_at_the_end() -> None:
    queue = ItemQueue(QueueShape(n=4, batch=2, window=4))
    queue.submit()
    queue.finish(0)
    queue.take(0)
    with pytest.raises(QueueError):
        queue.start_step()
    assert queue.start_step(partial=True) == [0]


def test_contradictory_state_is_refused() -> None:
    queue = ItemQueue(QueueShape(n=4, batch=2, window=4))
    queue.submit()
    queue.finish(0)
    broken = queue.to_dict() | {"finished_order": []}
    with pytest.raises(QueueError, match="contradictory"):
        ItemQueue.from_dict(queue.shape, broken)
