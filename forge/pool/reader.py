"""Reading a pool: what became of every item, and the trajectories it holds. Also works beside a running life."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from forge.pool import codec
from forge.pool.database import Database
from forge.types import DeathReason, ForgeError, ItemState, Json, Trajectory

_COLUMNS = (
    "position, state, domain, difficulty, members, task, attempt, submitted_s, finished_s, tokens, reward, death, "
    "lag, step"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolItem:
    """One item as the pool keeps it; None where it has not come to that yet.

    `attempt` counts the lives that started it again. `step` is the trainer step that has it, or has committed it.
    """

    position: int
    state: ItemState
    domain: str
    difficulty: float
    members: int
    task: Json
    attempt: int
    submitted_s: float
    finished_s: float | None
    tokens: int | None
    reward: float | None
    death: DeathReason | None
    lag: int | None
    step: int | None


class PoolReader:
    """Read-only access. A reader beside a running life sees each item as its last transaction left it."""

    def __init__(self, path: str | Path) -> None:
        self._db = Database(Path(path), read_only=True)

    def counts(self) -> dict[ItemState, int]:
        """Items by state; every state is a key."""
        found = dict(self._db.rows("SELECT state, count(*) FROM items GROUP BY state"))
        return {state: found.get(state.value, 0) for state in ItemState}

    def positions(self, state: ItemState) -> list[int]:
        """Positions in this state, ascending."""
        return [p for (p,) in self._db.rows("SELECT position FROM items WHERE state = ? ORDER BY position", state)]

    def item(self, position: int) -> PoolItem:
        rows = self._db.rows(f"SELECT {_COLUMNS} FROM items WHERE position = ?", position)
        if not rows:
            raise ForgeError(f"{self._db.path}: there is no item {position}")
        return _item(rows[0])

    def running_items(self) -> list[PoolItem]:
        """What a resumed life starts again, by position: same position and task, the attempt given here."""
        sql = f"SELECT {_COLUMNS} FROM items WHERE state = ? ORDER BY position"
        return [_item(row) for row in self._db.rows(sql, ItemState.RUNNING)]

    def waiting_items(self) -> dict[str, tuple[str, float, float | None]]:
        """Running and finished items as a `Resumed` event lists them: position -> domain, submitted, finished."""
        sql = "SELECT position, domain, submitted_s, finished_s FROM items WHERE state IN (?, ?) ORDER BY position"
        return {str(p): (*facts,) for p, *facts in self._db.rows(sql, ItemState.RUNNING, ItemState.FINISHED)}

    def trajectories(self, position: int) -> list[Trajectory]:
        """What the item's members did, by member; [] while it runs, or once dropped (`keep_trajectories`)."""
        rows = self._db.rows("SELECT data FROM trajectories WHERE position = ? ORDER BY member", position)
        return [codec.decode(data) for (data,) in rows]

    def queue_state(self) -> Json:
        """The queue as `ItemQueue.to_dict()` writes it, for `ItemQueue.from_dict`. Not of a pool of schema 1."""
        rows = self._db.rows("SELECT position, state, served, finish_order, taken_order, step FROM items ORDER BY 1")
        parked = self._db.rows(
            "SELECT position FROM items WHERE parked_s IS NOT NULL AND state IN ('running', 'finished', 'taken')"
        )
        taken = sorted((row for row in rows if row[4] is not None), key=lambda row: row[4])
        in_trainer = [(position, step) for position, state, _, _, _, step in taken if state == ItemState.TAKEN]
        finished = sorted((order, position) for position, state, _, order, _, _ in rows if state == ItemState.FINISHED)
        return {
            "states": [row[1] for row in rows],
            "served": [row[2] for row in rows],
            "committed": [row[0] for row in taken if row[1] != ItemState.TAKEN],
            "published": sum(row[1] == ItemState.PUBLISHED for row in rows),
            "finished_order": [position for _, position in finished],
            "forming": [position for position, step in in_trainer if step is None],
            "training": [position for position, step in in_trainer if step is not None],
            "parked": sorted(position for (position,) in parked),
        }

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _item(row: tuple[Any, ...]) -> PoolItem:
    names = _COLUMNS.split(", ")
    values = dict(zip(names, row, strict=True))
    values["state"] = ItemState(values["state"])
    values["task"] = json.loads(values["task"])
    values["death"] = None if values["death"] is None else DeathReason(values["death"])
    return PoolItem(**values)
