"""The pool beside a model in memory (the fold of the same events), killed and resumed at arbitrary points."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pool_support import MEMBERS, committed, copy_as_killed, task, trajectory

from forge import trace as ev
from forge.pool.intake import Delivery
from forge.pool.store import Pool
from forge.queue import QueueShape
from forge.train.checkpoint import Position
from forge.types import ItemState, Trajectory
from forge.views import Views

SHAPE = QueueShape(n=6, batch=2, window=3, publish_every=2, park_items=1, park_reach=4)


class PoolMachine(RuleBasedStateMachine):
    """`views` folds every event the pool gets. `stored` and `arrived` say which trajectories must be where."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="forge-pool-"))
        self.lives = 0
        self.pool = Pool(self.folder / "0.sqlite")
        self.views = Views(SHAPE, 1)
        self.attempts: dict[int, int] = {}
        self.arrived: dict[int, dict[int, Trajectory]] = {}
        self.stored: dict[int, list[Trajectory]] = {}
        self.checkpoint: Position | None = None
        self.now = 0.0

    # --- events ------

    def account(self, event: ev.Event) -> None:
        self.views.apply(event)
        self.pool(event)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def in_state(self, state: ItemState) -> list[int]:
        return [p for p, s in enumerate(self.views.queue.states) if s is state]

    def pick(self, data: st.DataObject, *states: ItemState) -> int:
        return data.draw(st.sampled_from([p for state in states for p in self.in_state(state)]))

    @precondition(lambda self: self.views.queue.may_submit())
    @rule()
    def submit(self) -> None:
        position = len(self.views.queue)
        self.pool.put_task(position, task(position))
        self.account(ev.Submitted(t=self.tick(), position=position, domain="a", difficulty=1.0, members=MEMBERS))
        self.attempts[position] = 0
        self.arrived[position] = {}

    @precondition(lambda self: self.attempts)
    @rule(data=st.data(), member=st.integers(0, MEMBERS - 1), late=st.booleans(), reward=st.floats(0, 1))
    def deliver(self, data: st.DataObject, member: int, late: bool, reward: float) -> None:
        """Any member of any item, in whatever state, perhaps again, perhaps from an attempt that is over."""
        position = data.draw(st.sampled_from(sorted(self.attempts)))
        attempt = self.attempts[position] - late
        given_one = trajectory(position, member, attempt, reward=reward)
        said = self.pool.deliver(given_one, attempt=attempt)
        here = self.arrived[position]
        if late or self.views.queue.states[position] is not ItemState.RUNNING:
            assert said is Delivery.REFUSED
        elif member in here:
            assert said is Delivery.DUPLICATE
        else:
            here[member] = given_one
            assert said is (Delivery.COMPLETE if len(here) == MEMBERS else Delivery.ACCEPTED)

    @precondition(lambda self: self.in_state(ItemState.RUNNING))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finish_now(self.pick(data, ItemState.RUNNING))

    def finish_now(self, position: int) -> None:
        for member in range(MEMBERS):
            if member not in self.arrived[position]:
                attempt = self.attempts[position]
                self.arrived[position][member] = trajectory(position, member, attempt)
                self.pool.deliver(self.arrived[position][member], attempt=attempt)
        self.account(ev.Finished(t=self.tick(), position=position, tokens=1, reward=0.5))
        self.stored[position] = [self.arrived[position][m] for m in range(MEMBERS)]

    @precondition(lambda self: self.in_state(ItemState.RUNNING) or self.in_state(ItemState.FINISHED))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        position = self.pick(data, ItemState.RUNNING, ItemState.FINISHED)
        self.bury(position)

    def bury(self, position: int) -> None:
        if self.views.queue.states[position] is ItemState.RUNNING:
            self.stored[position] = [one for _, one in sorted(self.arrived[position].items())]
        self.account(ev.Dead(t=self.tick(), position=position, reason="stale", tokens=1))
        self.bury_stale()

    def bury_stale(self) -> None:
        for position in self.views.queue.stale()[:1]:
            self.bury(position)

    @precondition(lambda self: self.views.queue.may_park())
    @rule()
    def park(self) -> None:
        self.account(ev.Parked(t=self.tick(), position=self.views.queue.head))
        self.bury_stale()

    def takeable(self) -> list[int]:
        queue = self.views.queue
        room = len(queue.forming) < SHAPE.batch
        return [p for p in queue.finished_order if room and queue.is_visible(p)]

    @precondition(lambda self: self.takeable())
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.take_now(data.draw(st.sampled_from(self.takeable())))

    def take_now(self, position: int) -> None:
        lag = self.views.queue.lag_if_taken(position)
        assert SHAPE.lag_items_bound is not None
        assert lag <= SHAPE.lag_items_bound  # the law holds across lives
        self.account(ev.Taken(t=self.tick(), position=position, lag_items=lag))
        self.bury_stale()

    @rule(data=st.data())
    def fill_batch(self, data: st.DataObject) -> None:
        """Many moves at once, so that short walks get as far as training, in the orders the window allows."""
        queue = self.views.queue
        while queue.may_submit():
            self.submit()
        while len(queue.forming) < SHAPE.batch and queue.waiting():
            position = data.draw(st.sampled_from([p for p in queue.waiting() if queue.is_visible(p)]))
            if queue.states[position] is ItemState.RUNNING:
                self.finish_now(position)
            self.take_now(position)
        if len(queue.forming) == SHAPE.batch and not queue.training:
            self.start_step()

    @precondition(lambda self: len(self.views.queue.forming) == SHAPE.batch and not self.views.queue.training)
    @rule()
    def start_step(self) -> None:
        positions = tuple(self.views.queue.forming)
        self.account(ev.StepStarted(t=self.tick(), step=self.views.step + 1, positions=positions))
        assert self.pool.batch(positions) == [self.stored[p] for p in positions]

    @precondition(lambda self: self.views.queue.training)
    @rule()
    def write_checkpoint(self) -> None:
        step = self.views.step + 1
        self.checkpoint = Position(step=step, version=step, positions=tuple(sorted(self.views.queue.training)))

    @precondition(lambda self: self.checkpoint and self.checkpoint.step > self.views.step)
    @rule()
    def commit(self) -> None:
        event = committed(tuple(self.views.queue.training), self.views.step + 1)
        self.account(event)
        self.pool(event)  # told twice, it counts once

    @precondition(lambda self: self.views.queue.published < len(self.views.queue.committed))
    @rule()
    def publish(self) -> None:
        queue, step = self.views.queue, self.views.step
        self.account(ev.Published(t=self.tick(), version=step, step=step, items=len(queue.committed)))

    @rule()
    def kill_and_resume(self) -> None:
        """As after kill -9: only the files as they are now survive. The model settles by the queue's own moves."""
        queue = self.views.queue
        self.lives += 1
        copy = copy_as_killed(self.pool._db.path, self.folder / f"{self.lives}.sqlite")
        self.pool.close()
        self.pool = Pool(copy)
        if self.checkpoint and self.checkpoint.step > self.views.step:
            queue.commit()
        queue.publish(len(queue.committed))
        queue.roll_back()
        resumed = self.pool.resume(self.checkpoint, self.tick())
        assert resumed.queue == queue.to_dict()
        assert (resumed.life, resumed.step) == (self.lives, self.checkpoint.step if self.checkpoint else 0)
        self.account(ev.decode(ev.encode(resumed)))
        self.no_trajectory_is_lost_or_doubled()
        for position in self.in_state(ItemState.RUNNING):
            self.attempts[position] += 1
            self.arrived[position] = {}
        assert {i.position: i.attempt for i in self.pool.running_items()} == {
            p: self.attempts[p] for p in self.in_state(ItemState.RUNNING)
        }

    @rule(data=st.data(), stage=st.sampled_from(["leased", "checkpointed", "committed", "published"]))
    def kill_around_a_checkpoint(self, data: st.DataObject, stage: str) -> None:
        """The moments that matter most, which a random walk seldom meets."""
        self.fill_batch(data)
        if self.views.queue.training and stage != "leased":
            self.write_checkpoint()
            if stage != "checkpointed":
                self.commit()
                if stage == "published":
                    self.publish()
        self.kill_and_resume()

    # --- what must always hold ------

    @invariant()
    def the_pool_is_the_fold(self) -> None:
        assert self.pool.queue_state() == self.views.queue.to_dict()
        assert self.pool.counts() == self.views.queue.counts()
        assert {int(p) for p in self.pool.waiting_items()} == set(self.views.queue.waiting())

    def no_trajectory_is_lost_or_doubled(self) -> None:
        for position in self.attempts:
            assert self.pool.trajectories(position) == self.stored.get(position, [])

    def teardown(self) -> None:
        self.no_trajectory_is_lost_or_doubled()
        self.pool.close()
        shutil.rmtree(self.folder)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
