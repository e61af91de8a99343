from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from pool_support import MEMBERS, committed, copy_as_killed, finish, submit, task, train, trajectory

from forge import trace as ev
from forge.pool.intake import Delivery
from forge.pool.reader import PoolReader
from forge.pool.store import Pool
from forge.queue import ItemQueue, QueueError, QueueShape
from forge.train.checkpoint import Position
from forge.types import DeathReason, ForgeError, ItemState

SHAPE = QueueShape(n=8, batch=2, window=8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pool.sqlite"


@pytest.fixture
def pool(path: Path) -> Iterator[Pool]:
    with Pool(path) as opened:
        yield opened


def test_an_item_keeps_everything_about_it(pool: Pool) -> None:
    submit(pool, 0, t=1.5)
    finish(pool, 0, t=2.5)
    pool(ev.Taken(t=3.0, position=0, lag_items=7))
    pool(ev.StepStarted(t=3.0, step=1, positions=(0,), partial=True))
    item = pool.item(0)
    assert (item.state, item.domain, item.difficulty, item.members) == (ItemState.TAKEN, "calc", 2.0, MEMBERS)
    assert (item.task, item.submitted_s, item.finished_s) == (task(0), 1.5, 2.5)
    assert (item.tokens, item.reward, item.lag, item.step, item.attempt) == (12, 0.5, 7, 1, 0)
    assert pool.batch([0]) == [[trajectory(0, m) for m in range(MEMBERS)]]


def test_a_submission_without_its_task_is_a_bug(pool: Pool) -> None:
    with pytest.raises(QueueError, match="without a task"):
        pool(ev.Submitted(t=0.0, position=0, domain="calc", difficulty=1.0, members=2))


def test_an_item_finishes_only_with_all_its_members(pool: Pool) -> None:
    submit(pool, 0)
    assert pool.deliver(trajectory(0, 1), attempt=0) is Delivery.ACCEPTED
    with pytest.raises(QueueError, match="1 of 2 members"):
        pool(ev.Finished(t=1.0, position=0, tokens=1, reward=1.0))
    assert pool.positions(ItemState.RUNNING) == [0]
    assert pool.deliver(trajectory(0, 0), attempt=0) is Delivery.COMPLETE
    pool(ev.Finished(t=1.0, position=0, tokens=1, reward=1.0))
    assert pool.trajectories(0) == [trajectory(0, m) for m in range(MEMBERS)]


def test_the_first_delivery_counts(pool: Pool) -> None:
    submit(pool, 0)
    pool.deliver(trajectory(0, 0, reward=0.25), attempt=0)
    assert pool.deliver(trajectory(0, 0, reward=0.75), attempt=0) is Delivery.DUPLICATE
    pool.deliver(trajectory(0, 1), attempt=0)
    pool(ev.Finished(t=1.0, position=0, tokens=1, reward=1.0))
    assert pool.trajectories(0)[0].outcome.reward == 0.25
    assert pool.deliver(trajectory(0, 0), attempt=0) is Delivery.REFUSED


def test_a_delivery_of_an_earlier_life_is_refused(path: Path) -> None:
    with Pool(path) as first:
        submit(first, 0)
        first.deliver(trajectory(0, 0), attempt=0)
    with Pool(path) as second:
        second.resume(None, 5.0)
        (item,) = second.running_items()
        assert (item.position, item.attempt, item.task) == (0, 1, task(0))
        assert second.deliver(trajectory(0, 0), attempt=0) is Delivery.REFUSED
        finish(second, 0, attempt=1)
        assert second.trajectories(0) == [trajectory(0, m, 1) for m in range(MEMBERS)]


def test_a_member_that_does_not_exist_is_a_bug(pool: Pool) -> None:
    submit(pool, 0)
    with pytest.raises(QueueError, match="no member 2"):
        pool.deliver(trajectory(0, 2), attempt=0)
    assert pool.deliver(trajectory(1, 0), attempt=0) is Delivery.REFUSED


def test_the_dead_are_kept_for_people(pool: Pool) -> None:
    submit(pool, 0)
    pool.deliver(trajectory(0, 0, alive=False), attempt=0)
    pool(ev.Dead(t=1.0, position=0, reason="timeout", tokens=9))
    assert (pool.item(0).state, pool.item(0).death) == (ItemState.DEAD, DeathReason.TIMEOUT)
    assert pool.trajectories(0) == [trajectory(0, 0, alive=False)]
    submit(pool, 1)
    finish(pool, 1)
    pool(ev.Dead(t=1.0, position=1, reason="stale", tokens=9))
    assert pool.counts()[ItemState.DEAD] == 2


def test_commit_is_idempotent(pool: Pool) -> None:
    for position in range(4):
        submit(pool, position)
        finish(pool, position)
    train(pool, (0, 2), 1)
    pool(committed((0, 2), 1))
    before = pool.queue_state()
    pool(committed((2, 0), 1))
    assert pool.queue_state() == before
    with pytest.raises(QueueError, match="did not lease"):
        pool(committed((0, 1), 1))
    with pytest.raises(QueueError, match="did not lease"):
        pool(committed((0, 2), 2))
    assert pool.queue_state() == before


def test_leases_are_exclusive(pool: Pool) -> None:
    for position in range(2):
        submit(pool, position)
        finish(pool, position)
    with pytest.raises(QueueError, match="not leased"):
        pool.batch([0])
    train(pool, (0, 1), 1)
    with pytest.raises(QueueError, match="position 0 is not finished"):
        pool(ev.Taken(t=1.0, position=0, lag_items=0))
    with pytest.raises(QueueError, match="not in the forming batch"):
        pool(ev.StepStarted(t=1.0, step=2, positions=(0, 1)))
    assert [len(group) for group in pool.batch([1, 0])] == [MEMBERS, MEMBERS]
    pool(committed((0, 1), 1))
    with pytest.raises(QueueError, match="committed, not leased"):
        pool.batch([0])


def test_publishing_more_than_is_committed_is_a_bug(pool: Pool) -> None:
    submit(pool, 0)
    with pytest.raises(QueueError, match="cannot publish 1"):
        pool(ev.Published(t=1.0, version=1, step=1, items=1))


def test_a_refused_event_changes_nothing(pool: Pool) -> None:
    submit(pool, 0)
    finish(pool, 0)
    before = pool.queue_state()
    with pytest.raises(QueueError, match="position 1"):
        train(pool, (1,), 1)
    pool(ev.Taken(t=2.0, position=0, lag_items=0))
    with pytest.raises(QueueError, match="position 1"):
        pool(ev.StepStarted(t=3.0, step=1, positions=(0, 1)))
    assert pool.queue_state() == before | {
        "states": ["taken"],
        "finished_order": [],
        "forming": [0],
    }


def test_trajectories_go_when_not_to_be_kept(path: Path) -> None:
    with Pool(path, keep_trajectories=False) as pool:
        for position in range(4):
            submit(pool, position)
            finish(pool, position)
        pool(ev.Dead(t=1.0, position=3, reason="stale", tokens=1))
        train(pool, (0, 1), 1)
        pool(committed((0, 1), 1))
        assert [len(pool.trajectories(p)) for p in range(4)] == [2, 2, 2, 0]
        pool(ev.Published(t=5.0, version=1, step=1, items=2))
        assert [len(pool.trajectories(p)) for p in range(4)] == [0, 0, 2, 0]


# --- the straggler escape ------


def test_parked_items_stay_parked_across_lives_and_finish_where_they_were(path: Path) -> None:
    with Pool(path) as pool:
        for position in range(3):
            submit(pool, position)
        pool(ev.Parked(t=1.0, position=0))
        with pytest.raises(QueueError, match="position 9 is not running"):
            pool(ev.Parked(t=1.0, position=9))
    with Pool(path) as pool:
        resumed = pool.resume(None, 2.0)
        assert resumed.queue["parked"] == [0]
        finish(pool, 0, attempt=1)
        assert pool.queue_state()["parked"] == [0]
        pool(ev.Dead(t=3.0, position=0, reason="stale", tokens=1))
        assert pool.queue_state()["parked"] == []


def test_what_was_parked_beyond_the_head_of_a_rollback_is_ordinary_again(path: Path) -> None:
    """1 was parked once 0 was taken; with 0 back in its place, 1 must wait its turn as if it had not been."""
    with Pool(path) as pool:
        for position in range(3):
            submit(pool, position)
        finish(pool, 0)
        pool(ev.Taken(t=2.0, position=0, lag_items=0))
        pool(ev.Parked(t=2.0, position=1))
        resumed = pool.resume(None, 3.0)
        assert resumed.queue["parked"] == []
        queue = ItemQueue.from_dict(QueueShape(n=8, batch=2, window=2, park_items=1, park_reach=2), resumed.queue)
        assert (queue.head, queue.is_visible(2)) == (0, False)


# --- resume ------


def two_steps(pool: Pool) -> None:
    """Step 1 committed, step 2 in the trainer (3, 2), item 4 in the forming batch, 5 finished, 6 running."""
    for position in range(7):
        submit(pool, position)
    for position in (5, 0, 1, 2, 3, 4):
        finish(pool, position)
    train(pool, (0, 1), 1)
    pool(committed((0, 1), 1))
    train(pool, (3, 2), 2)
    pool(ev.Taken(t=4.0, position=4, lag_items=0))


STEP_1 = Position(step=1, version=1, positions=(0, 1))
STEP_2 = Position(step=2, version=2, positions=(2, 3))


def test_resume_from_the_committed_step_rolls_back(pool: Pool) -> None:
    two_steps(pool)
    assert pool.split_taken(STEP_1) == ([], [3, 2, 4])
    resumed = pool.resume(STEP_1, 9.0)
    queue = ItemQueue.from_dict(SHAPE, resumed.queue)
    assert (queue.committed, queue.published, queue.finished_order) == ([0, 1], 2, [5, 3, 2, 4])
    assert (queue.head, queue.taken, queue.running) == (2, 2, 1)
    assert (resumed.life, resumed.step, resumed.version, resumed.published_step, resumed.t) == (1, 1, 1, 1, 9.0)
    assert resumed.items["5"] == ("calc", 0.0, 1.0)
    assert resumed.items["6"] == ("calc", 0.0, None)
    assert sorted(resumed.items) == ["2", "3", "4", "5", "6"]
    assert ev.encode(resumed)  # it goes into the trace
    assert pool.item(3).step is None


def test_the_checkpoint_is_what_commits(pool: Pool) -> None:
    two_steps(pool)
    assert pool.split_taken(STEP_2) == ([3, 2], [4])
    resumed = pool.resume(STEP_2, 9.0)
    queue = ItemQueue.from_dict(SHAPE, resumed.queue)
    assert (queue.committed, queue.published, queue.finished_order) == ([0, 1, 3, 2], 4, [5, 4])
    assert (resumed.step, resumed.version) == (2, 2)
    again = pool.resume(STEP_2, 10.0)
    assert (again.life, again.queue) == (2, resumed.queue)
    assert pool.item(6).attempt == 2


def test_resume_before_anything_was_committed(pool: Pool) -> None:
    assert pool.resume(None, 0.0).queue["states"] == []
    submit(pool, 0)
    finish(pool, 0)
    train(pool, (0,), 1)
    resumed = pool.resume(None, 1.0)
    assert (resumed.queue["states"], resumed.step, resumed.version) == (["finished"], 0, 0)


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (None, "the pool has committed step 1, but the newest whole checkpoint is missing"),
        (Position(step=0, version=0, positions=()), "newest whole checkpoint is of step 0"),
        (Position(step=1, version=1, positions=(0, 2)), "different runs"),
        (Position(step=2, version=1, positions=(2, 4)), "different runs"),
        (Position(step=3, version=1, positions=(2, 3)), "different runs"),
    ],
)
def test_a_checkpoint_that_contradicts_the_pool(pool: Pool, checkpoint: Position | None, message: str) -> None:
    two_steps(pool)
    before = pool.queue_state()
    with pytest.raises(ForgeError, match=message):
        pool.resume(checkpoint, 9.0)
    assert pool.queue_state() == before


# --- producers ------


def test_threads_may_deliver_at_once(pool: Pool) -> None:
    items = range(20)
    for position in items:
        submit(pool, position)
    work = [(p, m) for p in items for m in range(MEMBERS)] * 3
    Random(0).shuffle(work)

    def deliver(what: tuple[int, int]) -> tuple[int, Delivery]:
        said = pool.deliver(trajectory(*what), attempt=0)
        if said is Delivery.COMPLETE:
            pool(ev.Finished(t=1.0, position=what[0], tokens=1, reward=1.0))
        return what[0], said

    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(deliver, work))
    assert sorted(p for p, s in said if s is Delivery.COMPLETE) == list(items)
    assert sum(s is Delivery.ACCEPTED for _, s in said) == len(items) * (MEMBERS - 1)
    assert pool.positions(ItemState.FINISHED) == list(items)
    assert all(pool.trajectories(p) == [trajectory(p, m) for m in range(MEMBERS)] for p in items)


async def test_tasks_of_one_loop_may_deliver_in_any_order(pool: Pool) -> None:
    async def member(position: int, index: int, delay: float) -> None:
        await asyncio.sleep(delay)
        if pool.deliver(trajectory(position, index), attempt=0) is Delivery.COMPLETE:
            pool(ev.Finished(t=1.0, position=position, tokens=1, reward=1.0))

    for position in range(10):
        submit(pool, position)
    rng = Random(1)
    await asyncio.gather(*(member(p, m, rng.random() / 50) for p in range(10) for m in range(MEMBERS)))
    assert pool.counts()[ItemState.FINISHED] == 10


# --- the file ------


def test_a_pool_open_elsewhere_names_the_process(pool: Pool, path: Path) -> None:
    with pytest.raises(ForgeError, match=f"already open in process {os.getpid()}"):
        Pool(path)
    submit(pool, 0)
    pool.close()
    pool.close()
    with Pool(path) as next_one:
        assert next_one.positions(ItemState.RUNNING) == [0]


def test_readers_look_beside_a_running_life(pool: Pool, path: Path) -> None:
    submit(pool, 0)
    with PoolReader(path) as reader:
        assert reader.counts()[ItemState.RUNNING] == 1
        finish(pool, 0)
        assert reader.counts()[ItemState.FINISHED] == 1
        assert reader.trajectories(0) == pool.trajectories(0)
        with pytest.raises(ForgeError, match="no item 5"):
            reader.item(5)
    with pytest.raises(ForgeError, match="no pool here"):
        PoolReader(path.with_name("absent.sqlite"))


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no such folder"):
        Pool(tmp_path / "absent" / "pool.sqlite")


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(ForgeError, match=r"damaged .*not a database"):
        Pool(path)
    path.unlink()
    with Pool(path):  # the failed attempt left no lock behind
        pass


def test_a_damaged_page(path: Path) -> None:
    with Pool(path) as pool:
        for position in range(40):
            submit(pool, position)
            finish(pool, position)
    data = bytearray(path.read_bytes())
    for page in range(3, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(ForgeError, match="damaged"):
        Pool(path)


def test_a_truncated_file(path: Path) -> None:
    with Pool(path) as pool:
        for position in range(40):
            submit(pool, position)
            finish(pool, position)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ForgeError, match="damaged"):
        Pool(path)


def test_another_schema_and_another_program(path: Path) -> None:
    with Pool(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(ForgeError, match="schema 99; this Forge reads schemas 1 and 2"):
        Pool(path)
    other = path.with_name("other.sqlite")
    connection = sqlite3.connect(other)
    connection.execute("CREATE TABLE songs (name TEXT)")
    connection.close()
    with pytest.raises(ForgeError, match="no Forge pool"):
        Pool(other)


def as_of_schema_1(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE items DROP COLUMN parked_s")
    connection.execute("PRAGMA user_version = 1")
    connection.close()


def test_a_pool_from_before_the_escape_is_read_and_goes_on(path: Path) -> None:
    with Pool(path) as pool:
        submit(pool, 0)
        submit(pool, 1)
        finish(pool, 1)
    as_of_schema_1(path)
    with PoolReader(path) as reader:
        assert reader.item(1).state is ItemState.FINISHED
        assert len(reader.trajectories(1)) == MEMBERS
    with Pool(path) as pool:
        resumed = pool.resume(None, 5.0)
        assert resumed.queue["parked"] == []
        pool(ev.Parked(t=6.0, position=0))
        assert pool.queue_state()["parked"] == [0]


def test_a_pool_killed_while_being_made(path: Path) -> None:
    path.touch()
    with Pool(path) as pool:
        submit(pool, 0)
        assert pool.positions(ItemState.RUNNING) == [0]


def test_a_torn_wal_loses_only_its_last_transaction(pool: Pool, path: Path) -> None:
    for position in range(3):
        submit(pool, position)
    copy = copy_as_killed(path, path.with_name("copy.sqlite"))
    wal = copy.with_name("copy.sqlite-wal")
    os.truncate(wal, wal.stat().st_size - 100)
    with Pool(copy) as torn:
        assert torn.positions(ItemState.RUNNING) == [0, 1]


def test_a_full_disk_is_one_clear_line(pool: Pool) -> None:
    submit(pool, 0)
    pool._db.rows("PRAGMA max_page_count = 9")  # SQLite then answers as on a full disk
    pool.put_task(1, {"text": "x" * 1_000_000})
    with pytest.raises(ForgeError, match=r"cannot read or write the pool: database or disk is full"):
        pool(ev.Submitted(t=1.0, position=1, domain="calc", difficulty=2.0, members=MEMBERS))
    assert pool.positions(ItemState.RUNNING) == [0]
