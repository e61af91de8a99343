"""Items under way: which members of a group have ended, and with what."""

from __future__ import annotations

from dataclasses import dataclass, field

from forge.control import commonest
from forge.domains.base import Task
from forge.types import DeathReason, Outcome, Trajectory


@dataclass
class Group:
    """One item while it runs. `attempt` counts its lives: a resumed run plays a running item again."""

    position: int
    attempt: int
    task: Task
    members: int
    ended: dict[int, Trajectory] = field(default_factory=dict)

    def trajectory_id(self, member: int) -> str:
        return f"{self.position}.{member}.{self.attempt}"

    def missing(self) -> list[int]:
        return [m for m in range(self.members) if m not in self.ended]

    @property
    def is_done(self) -> bool:
        return len(self.ended) == self.members

    @property
    def tokens(self) -> int:
        return sum(len(c.sampled_ids) for t in self.ended.values() for c in t.completions)

    @property
    def rewards(self) -> list[float]:
        return [t.outcome.reward for _, t in sorted(self.ended.items()) if t.outcome.reward is not None]

    def trajectories(self) -> list[Trajectory]:
        return [t for _, t in sorted(self.ended.items())]

    def commonest_death(self) -> DeathReason:
        """Why a group without enough survivors died: what killed most of its members."""
        reasons = [t.outcome.reason for t in self.trajectories() if t.outcome.reason is not None]
        return commonest(reasons)


def parse_trajectory(trajectory: str) -> tuple[int, int, int]:
    """(position, member, attempt) of a training trajectory's id."""
    position, member, attempt = trajectory.split(".")
    return int(position), int(member), int(attempt)


def timed_out(trajectory: str) -> Outcome:
    """For a member whose agent process does not answer any more."""
    return Outcome(trajectory=trajectory, reward=None, reason=DeathReason.TIMEOUT, detail="no answer from its agent")


def left_behind(trajectory: str) -> Outcome:
    """For a member of a parked item that the window has left too far behind."""
    return Outcome(trajectory=trajectory, reward=None, reason=DeathReason.STALE, detail="parked, and left behind")
