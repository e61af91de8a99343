"""The data pool: the durable store between rollouts, which end in any order, and the trainer.

`Pool` is the event sink that stands before the trace. Each event that concerns an item is one transaction, and it
has happened when the call returns. Whatever moment the process is killed at:

- an item once accounted as finished keeps its trajectories: they are stored in the transaction that finishes it;
- a taken item is leased, to the forming batch and then to one trainer step, and nobody else can get it;
- what commits a step is its checkpoint folder. `resume` compares the newest one with the pool and settles the rest.

Lost are only rollouts under way: members delivered before their item finished wait in memory, and a resumed life
starts those items again, at the same position, with the next attempt number.

Power loss: `StepStarted` and `resume` are synced to disk, and with them all that came before. So a batch is on disk
before a checkpoint can contain it, and after a power cut too no item is trained twice. Items that finished or were
submitted since the last step may then be gone; they run, or are submitted, again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forge import trace as ev
from forge.pool.database import Database
from forge.pool.intake import Delivery, Intake, Running
from forge.pool.reader import PoolReader
from forge.queue import QueueError
from forge.train.checkpoint import Position
from forge.types import DeathReason, ForgeError, ItemState, Trajectory

_STORE = "INSERT INTO trajectories VALUES (?, ?, ?)"
_UNPARK = (
    "UPDATE items SET parked_s = NULL WHERE parked_s IS NOT NULL AND state IN ('running', 'finished') AND position > "
    "(SELECT min(position) FROM items WHERE parked_s IS NULL AND state IN ('running', 'finished'))"
)
_DONE = "state IN ('committed', 'published')"


class Pool(PoolReader):
    """The one writer of a pool file. Calls may come from any thread; events must come in the order accounted.

    With `keep_trajectories` off, trajectories go once their item is published or dead, and the file stops growing
    with the run. An exception out of `apply` means that the event is not stored: the run must end, and may resume.
    """

    def __init__(self, path: str | Path, *, keep_trajectories: bool = True) -> None:
        self._db = Database(Path(path))
        self._keep = keep_trajectories
        self._tasks: dict[int, str] = {}
        self._load()

    def _load(self) -> None:
        """Counters of the next order numbers, and the items that run."""

        def ask(sql: str) -> int:
            return int(self._db.rows(sql)[0][0])

        self._next_finish = ask("SELECT coalesce(max(finish_order) + 1, 0) FROM items")
        self._taken = ask("SELECT count(taken_order) FROM items")
        self._published = ask("SELECT count(*) FROM items WHERE state = 'published'")
        running = self._db.rows("SELECT position, attempt, members FROM items WHERE state = 'running'")
        self._intake = Intake(self._db.mutex, {position: Running(*facts) for position, *facts in running})

    # --- producers ------

    def put_task(self, position: int, task: Mapping[str, Any]) -> None:
        """Say what the next submission of `position` is about; stored in the transaction that submits it."""
        self._tasks[position] = json.dumps(task, separators=(",", ":"))

    def deliver(self, trajectory: Trajectory, *, attempt: int) -> Delivery:
        """One member of a running item has ended. Any order, any thread; it waits until the item finishes or dies."""
        return self._intake.deliver(trajectory, attempt)

    # --- the trainer ------

    def batch(self, positions: Sequence[int]) -> list[list[Trajectory]]:
        """The groups of leased (taken) items, in the order asked for. Reading does not end the lease."""
        for position in positions:
            state = self.item(position).state
            if state is not ItemState.TAKEN:
                raise QueueError(f"position {position} is {state}, not leased to the trainer")
        return [self.trajectories(position) for position in positions]

    # --- the event sink ------

    def __call__(self, event: ev.Event) -> None:
        self.apply(event)

    def apply(self, event: ev.Event) -> None:
        """Make an event durable. Raises QueueError for an illegal one; events that concern no item cost nothing."""
        with self._db.mutex:
            match event:
                case ev.Submitted():
                    self._submit(event)
                case ev.Finished():
                    self._finish(event)
                case ev.Dead():
                    self._die(event)
                case ev.Taken():
                    self._take(event)
                case ev.Parked():
                    self._park(event)
                case ev.StepStarted():
                    self._start_step(event)
                case ev.Committed():
                    self._commit(event)
                case ev.Published():
                    self._publish(event)
                case _:
                    pass  # `resume` has already stored what a Resumed event says

    def _submit(self, event: ev.Submitted) -> None:
        task = self._tasks.get(event.position)
        if task is None:
            raise QueueError(f"position {event.position} is submitted without a task; call put_task before")
        with self._db.transaction() as connection:
            connection.execute(
                "INSERT INTO items (position, state, domain, difficulty, members, task, served, attempt, submitted_s) "
                "VALUES (?, 'running', ?, ?, ?, ?, ?, 0, ?)",
                (event.position, event.domain, event.difficulty, event.members, task, self._published, event.t),
            )
        del self._tasks[event.position]
        self._intake.open(event.position, event.members)

    def _finish(self, event: ev.Finished) -> None:
        running = self._intake.get(event.position)
        if running is None:
            raise QueueError(f"position {event.position} is not running")
        if len(running.delivered) < running.members:
            raise QueueError(f"position {event.position}: {len(running.delivered)} of {running.members} members came")
        with self._db.transaction() as connection:
            connection.executemany(_STORE, running.rows(event.position))
            _move(
                connection,
                event.position,
                ItemState.RUNNING,
                ItemState.FINISHED,
                finished_s=event.t,
                finish_order=self._next_finish,
                tokens=event.tokens,
                reward=event.reward,
            )
        self._next_finish += 1
        self._intake.close(event.position)

    def _die(self, event: ev.Dead) -> None:
        running = self._intake.get(event.position)
        before = ItemState.FINISHED if running is None else ItemState.RUNNING
        facts = {"finished_s": event.t, "tokens": event.tokens, "death": DeathReason(event.reason)}
        with self._db.transaction() as connection:
            _move(connection, event.position, before, ItemState.DEAD, **facts)
            if not self._keep:
                connection.execute("DELETE FROM trajectories WHERE position = ?", (event.position,))
            elif running is not None:
                connection.executemany(_STORE, running.rows(event.position))  # for people: why did it die?
        self._intake.close(event.position)

    def _take(self, event: ev.Taken) -> None:
        order = {"taken_order": self._taken, "lag": event.lag_items}
        with self._db.transaction() as connection:
            _move(connection, event.position, ItemState.FINISHED, ItemState.TAKEN, **order)
        self._taken += 1

    def _park(self, event: ev.Parked) -> None:
        with self._db.transaction() as connection:
            _move(connection, event.position, ItemState.RUNNING, ItemState.RUNNING, parked_s=event.t)

    def _start_step(self, event: ev.StepStarted) -> None:
        with self._db.transaction(power_safe=True) as connection:
            for position in event.positions:
                leased = connection.execute(
                    "UPDATE items SET step = ? WHERE position = ? AND state = 'taken' AND step IS NULL",
                    (event.step, position),
                ).rowcount
                if leased != 1:
                    raise QueueError(f"position {position} is not in the forming batch")

    def _commit(self, event: ev.Committed) -> None:
        """Idempotent: a step that is committed already, with these very items, is left as it is."""
        if sorted(self._committed_by(event.step)) == sorted(event.positions):
            return
        leased = self._db.rows("SELECT position FROM items WHERE state = 'taken' AND step = ?", event.step)
        if sorted(p for (p,) in leased) != sorted(event.positions):
            raise QueueError(f"step {event.step} did not lease {list(event.positions)}")
        with self._db.transaction() as connection:
            for position in event.positions:
                _move(connection, position, ItemState.TAKEN, ItemState.COMMITTED)

    def _publish(self, event: ev.Published) -> None:
        with self._db.transaction() as connection:
            self._publish_up_to(connection, event.items)
        self._published = event.items

    def _publish_up_to(self, connection: sqlite3.Connection, items: int) -> None:
        moved = connection.execute(
            "UPDATE items SET state = 'published' WHERE taken_order >= ? AND taken_order < ? AND state = 'committed'",
            (self._published, items),
        ).rowcount
        if moved != items - self._published:
            raise QueueError(f"cannot publish {items}: {self._published} published, {moved} committed after them")
        if not self._keep:
            connection.execute(
                "DELETE FROM trajectories WHERE position IN "
                "(SELECT position FROM items WHERE taken_order >= ? AND taken_order < ?)",
                (self._published, items),
            )

    def _committed_by(self, step: int) -> list[int]:
        return [p for (p,) in self._db.rows(f"SELECT position FROM items WHERE step = ? AND {_DONE}", step)]

    # --- a new life ------

    def split_taken(self, checkpoint: Position | None) -> tuple[list[int], list[int]]:
        """What `resume` will make of the taken items: (committed by this checkpoint, rolled back), in taken order.

        `checkpoint` is the position of the newest durable one, None where there is none. Raises ForgeError where it
        cannot belong to this pool, or where the pool has committed more than it contains.
        """
        with self._db.mutex:
            step, trained = (0, []) if checkpoint is None else (checkpoint.step, sorted(checkpoint.positions))
            done = int(self._db.rows(f"SELECT coalesce(max(step), 0) FROM items WHERE {_DONE}")[0][0])
            queue = self.queue_state()
            training, forming = queue["training"], queue["forming"]
            if step < done:
                newest = f"of step {step}" if checkpoint else "missing"
                raise ForgeError(
                    f"{self._db.path}: the pool has committed step {done}, but the newest whole checkpoint is "
                    f"{newest}; put the checkpoint of step {done} back, or start a new run"
                )
            if step == done and trained == sorted(self._committed_by(done)):
                return [], training + forming
            if step == done + 1 and trained == sorted(training):
                return training, forming
            raise ForgeError(
                f"{self._db.path}: the checkpoint of step {step} trained items {trained}, but the pool has committed "
                f"step {done} and leased {training} to the next; they belong to different runs"
            )

    def resume(self, checkpoint: Position | None, now: float) -> ev.Resumed:
        """Settle what the last life left open, and begin the next. `checkpoint` as for `split_taken`.

        The items in it are committed. Other taken items return to their positions as finished. Running items stay
        running, with the next attempt number. Parked ones stay parked, unless the head returns to before them
        (`ItemQueue.roll_back`). The engines of the new life load the checkpoint, so everything
        committed is published in it: had it stayed committed until a publication that is already served, the queue
        would hold back submissions for nothing, or, with k*P = N, for ever.
        """
        with self._db.mutex:
            held, lost = self.split_taken(checkpoint)
            step, version = (checkpoint.step, checkpoint.version) if checkpoint else (0, 0)
            committed = self._taken - len(lost)
            life = int(self._db.rows("SELECT coalesce(max(life), 0) + 1 FROM lives")[0][0])
            with self._db.transaction(power_safe=True) as connection:
                for p in held:
                    _move(connection, p, ItemState.TAKEN, ItemState.COMMITTED)
                self._publish_up_to(connection, committed)
                for order, p in enumerate(lost, self._next_finish):
                    back = {"finish_order": order, "taken_order": None, "lag": None, "step": None}
                    _move(connection, p, ItemState.TAKEN, ItemState.FINISHED, **back)
                connection.execute(_UNPARK)
                connection.execute("UPDATE items SET attempt = attempt + 1 WHERE state = 'running'")
                connection.execute("INSERT INTO lives VALUES (?, ?, ?)", (life, now, step))
            self._tasks.clear()
            self._load()
            return ev.Resumed(
                t=now,
                life=life,
                queue=self.queue_state(),
                items=self.waiting_items(),
                step=step,
                version=version,
                published_step=step,
            )


def _move(connection: sqlite3.Connection, position: int, before: ItemState, after: ItemState, **facts: object) -> None:
    """Compare and set: the item must be in `before`, so no event can move it twice."""
    columns = "".join(f", {name} = ?" for name in facts)
    moved = connection.execute(
        f"UPDATE items SET state = ?{columns} WHERE position = ? AND state = ?",
        (after, *facts.values(), position, before),
    ).rowcount
    if moved != 1:
        raise QueueError(f"position {position} is not {before}")
