"""`forge serve --record DIR`: closed trajectories of outside agents, in a pool that `PoolReader` reads.

Every trajectory is an item with one member, at the position in which it began; its task says its name. With a reward it
is finished, without one dead with its reason. What was under way when the process was killed is dead: its completions
were in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from forge import trace as ev
from forge.pool.store import Pool
from forge.types import Completion, DeathReason, ForgeError, ItemState, Outcome, Trajectory

POOL = "pool.sqlite"
DOMAIN = "recorded"


class PoolRecording:
    """A `forge.gateway.sessions.Recording`. `resumed_s`: where the clock of an earlier recording in this folder stood.
    Raises ForgeError."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ForgeError(f"--record {folder}: cannot be made a folder: {error.strerror}") from None
        self._pool = Pool(folder / POOL)
        self.resumed_s = 0.0
        self._ended: set[str] = set()
        self._running: dict[str, int] = {}
        self._next = sum(self._pool.counts().values())
        for position in range(self._next):
            item = self._pool.item(position)
            if item.domain != DOMAIN:
                self._pool.close()
                raise ForgeError(f"--record {folder}: holds the pool of a run; name another folder")
            self._ended.add(item.task["trajectory"])
            self.resumed_s = max(self.resumed_s, item.submitted_s, item.finished_s or 0.0)
        for item in self._pool.running_items():
            self._pool.apply(self._dead(item.position, DeathReason.ENVIRONMENT, 0, self.resumed_s))

    def begin(self, trajectory: str, now: float) -> None:
        position, self._next = self._next, self._next + 1
        self._pool.put_task(position, {"trajectory": trajectory})
        self._pool.apply(ev.Submitted(t=now, position=position, domain=DOMAIN, difficulty=0.0, members=1))
        self._running[trajectory] = position

    def end(self, completions: Sequence[Completion], outcome: Outcome, now: float) -> None:
        position = self._running.pop(outcome.trajectory)
        self._ended.add(outcome.trajectory)
        if outcome.reward is not None and not completions:
            # Scored without a call of the model: there is nothing of the policy's to learn from.
            outcome = replace(outcome, reward=None, reason=DeathReason.AGENT_CRASH, detail="never called the model")
        whole = Trajectory(
            id=outcome.trajectory, position=position, member=0, completions=tuple(completions), outcome=outcome
        )
        self._pool.deliver(whole, attempt=0)
        tokens = sum(len(one.sampled_ids) for one in completions)
        if outcome.reward is None:
            self._pool.apply(self._dead(position, outcome.reason or DeathReason.AGENT_CRASH, tokens, now))
        else:
            self._pool.apply(ev.Finished(t=now, position=position, tokens=tokens, reward=outcome.reward))

    def has_ended(self, trajectory: str) -> bool:
        return trajectory in self._ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()

    @property
    def counts(self) -> dict[ItemState, int]:
        return self._pool.counts()

    @staticmethod
    def _dead(position: int, reason: DeathReason, tokens: int, now: float) -> ev.Dead:
        return ev.Dead(t=now, position=position, reason=reason.value, tokens=tokens)
