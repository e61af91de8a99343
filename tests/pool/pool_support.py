"""Made-up work for the pool's tests: trajectories with every field set, tasks, and the events of one item."""

from __future__ import annotations

from pathlib import Path
from random import Random

from forge import trace as ev
from forge.pool.intake import Delivery
from forge.pool.store import Pool
from forge.types import Completion, DeathReason, Outcome, Trajectory

MEMBERS = 2


def trajectory(
    position: int,
    member: int,
    attempt: int = 0,
    *,
    turns: int = 2,
    sampled: int = 3,
    reward: float | None = None,
    alive: bool = True,
) -> Trajectory:
    """Deterministic in its arguments, and different for any two of them."""
    rng = Random(f"{position}.{member}.{attempt}")
    name = f"{position}.{member}.{attempt}"
    context: tuple[int, ...] = tuple(rng.randrange(50_000) for _ in range(5))
    completions = []
    for turn in range(turns):
        new = tuple(rng.randrange(50_000) for _ in range(sampled))
        completions.append(
            Completion(
                trajectory=name,
                index=turn,
                prompt_ids=context,
                sampled_ids=new,
                logprobs=tuple(-rng.random() for _ in new),
                versions=tuple(rng.randrange(9) for _ in new),
                finish="stop",
                temperature=rng.random(),
                received_s=rng.random(),
                first_token_s=rng.random(),
                finished_s=rng.random(),
                instance=rng.randrange(4),
            )
        )
        context = (*context, *new, rng.randrange(50_000))
    outcome = Outcome(
        trajectory=name,
        reward=(rng.random() if reward is None else reward) if alive else None,
        reason=None if alive else DeathReason.AGENT_CRASH,
        turns=turns,
        tool_calls=rng.randrange(3),
        tool_wait_s=rng.random(),
        detail="ü\n",
    )
    return Trajectory(id=name, position=position, member=member, completions=tuple(completions), outcome=outcome)


def task(position: int) -> dict[str, object]:
    return {"id": f"task-{position}", "data": {"key": ["a", position]}}


def submit(pool: Pool, position: int, t: float = 0.0) -> None:
    pool.put_task(position, task(position))
    pool(ev.Submitted(t=t, position=position, domain="calc", difficulty=2.0, members=MEMBERS))


def finish(pool: Pool, position: int, attempt: int = 0, t: float = 1.0) -> None:
    said = [pool.deliver(trajectory(position, member, attempt), attempt=attempt) for member in range(MEMBERS)]
    assert said[-1] is Delivery.COMPLETE
    pool(ev.Finished(t=t, position=position, tokens=12, reward=0.5))


def train(pool: Pool, positions: tuple[int, ...], step: int) -> None:
    """Take the items and start a step; its checkpoint and commit are the test's."""
    for position in positions:
        pool(ev.Taken(t=2.0, position=position, lag_items=position))
    pool(ev.StepStarted(t=3.0, step=step, positions=positions))


def committed(positions: tuple[int, ...], step: int) -> ev.Committed:
    return ev.Committed(t=4.0, step=step, positions=positions, train_s=0.0, data_s=0.0, io_s=0.0, tokens=1)


def copy_as_killed(source: Path, target: Path) -> Path:
    """The files as kill -9 leaves them now: what SQLite has handed to the operating system, and no more."""
    for end in ("", "-wal"):
        part = source.with_name(source.name + end)
        if part.exists():
            target.with_name(target.name + end).write_bytes(part.read_bytes())
    return target
