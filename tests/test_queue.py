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


def shape_outside(n: int, batch: int, window: int | None, publish_every: int) -> QueueShape:
    """A shape that the validity condition refuses, made behind its back."""
    shape = object.__new__(QueueShape)
    for key, value in (("n", n), ("batch", batch), ("window", window), ("publish_every", publish_every)):
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
        self.shape = QueueShape(n=n, batch=batch, window=window, publish_every=k)
        self.queue = ItemQueue(self.shape)
        self.state: list[str] = []
        self.served: list[tuple[int, int]] = []  # items and steps in the weights at submission
        self.taken: list[int] = []  # in order, without what was rolled back
        self.batches: list[int] = []  # sizes committed
        self.steps_published = 0
        self.published = 0
        self.passed_by: dict[int, set[int]] = {}

    # books

    @property
    def head(self) -> int:
        return next((p for p, s in enumerate(self.state) if s in ("running", "finished")), len(self.state))

    def of(self, *states: str) -> list[int]:
        return [p for p, s in enumerate(self.state) if s in states]

    def visible(self, position: int) -> bool:
        window = self.shape.window
        return window is None or self.head <= position <= self.head + window - 1

    # moves

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
        self.queue.die(position)
        self.state[position] = "dead"
        if full:
            assert self.queue.may_submit(), "a dead item frees its slot at once"

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
        passed = [q for q in self.of("running", "finished") if q < position]
        for q in passed:
            self.passed_by.setdefault(q, set()).add(position)
        if self.shape.window is not None:
            assert lag <= self.shape.n + self.shape.window - 2
            assert len(passed) <= self.shape.window - 1, "overtakes at most W - 1"
            assert all(len(self.passed_by[q]) <= self.shape.window - 1 for q in passed), "overtaken by at most W - 1"
        self.state[position] = "taken"
        self.taken.append(position)

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
            lags = [len(self.batches) - self.served[p][1] for p in batch]
            assert max(lags) <= (self.shape.n + self.shape.window - 2) // self.shape.batch

    @precondition(lambda self: self.queue.training)
    @rule()
    def commit(self) -> None:
        done = self.queue.commit()
        self.batches.append(len(done))
        for position in done:
            self.state[position] = "committed"

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
        again = ItemQueue.from_dict(self.shape, json.loads(json.dumps(self.queue.to_dict())))
        assert again.to_dict() == self.queue.to_dict()
        assert (again.head, again.taken, again.dead) == (self.queue.head, self.queue.taken, self.queue.dead)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert [s.value for s in self.queue.states] == self.state
        assert self.queue.head == self.head
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

    rule = "design"  # or "no publication rule", "dead held"
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

    def branch(self, *, with_lag: bool) -> Searched:
        """A copy without the items that no longer matter: published or dead, and below the head if that has a say."""
        below = self.head if self.shape.window is not None else len(self.states)
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
            },
        )
        assert isinstance(copy, Searched)
        copy.rule, copy.held, copy.steps = self.rule, self.held, self.steps
        return copy

    def key(self) -> tuple[object, ...]:
        waiting = [s.value if s in WAITING else "-" for s in self.states[self.head :]]
        if self.shape.window is None:
            waiting = sorted(w for w in waiting if w != "-")
        served = [self.taken - self._served[p] for p in self.waiting()]
        credit = self.published + self.dead - self.held - len(self.states)
        unpublished = len(self.committed) - self.published
        return (*waiting, credit, *served, len(self.forming), len(self.training), unpublished, self.steps)

    def moves(self) -> Iterator[tuple[str, int]]:
        """What the world or a driver may do next: rollouts end or die in any order, takes are any visible item."""
        if self.may_submit():
            yield "submit", 0
        for position in self.waiting():
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
    _, stuck, _ = search(shape_outside(n, batch, window, k))
    assert stuck
    with pytest.raises(ForgeError, match="deadlock"):
        QueueShape(n=n, batch=batch, window=window, publish_every=k)


@pytest.mark.parametrize(("n", "window"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2)])
def test_the_lag_bound_holds_in_every_state_and_is_reached(n: int, window: int) -> None:
    shape = QueueShape(n=n, batch=1, window=window)
    assert search(shape, with_lag=True)[2] == n + window - 2 == shape.lag_items_bound


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
