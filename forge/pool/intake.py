"""Where members of running items wait until their item ends. In memory: a crash loses rollouts under way, no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from threading import RLock

from forge.pool import codec
from forge.queue import QueueError
from forge.types import Trajectory


class Delivery(StrEnum):
    """What became of a delivered member."""

    ACCEPTED = "accepted"
    COMPLETE = "complete"  # accepted, and the item now has all its members: said once per item
    DUPLICATE = "duplicate"  # this member had already come; the first one counts
    REFUSED = "refused"  # from an earlier attempt, or the item no longer runs


@dataclass(slots=True)
class Running:
    """A running item: which attempt may deliver, how many members it has, and what came (with its encoding)."""

    attempt: int
    members: int
    delivered: dict[int, tuple[Trajectory, bytes]] = field(default_factory=dict)

    def rows(self, position: int) -> list[tuple[int, int, bytes]]:
        """What came, as rows of the table of trajectories."""
        return [(position, member, data) for member, (_, data) in sorted(self.delivered.items())]


class Intake:
    """Running items by position. The mutex is the pool's, so that nothing is accepted for an item about to end."""

    def __init__(self, mutex: RLock, running: dict[int, Running]) -> None:
        self._mutex = mutex
        self._running = running

    def open(self, position: int, members: int) -> None:
        self._running[position] = Running(0, members)

    def get(self, position: int) -> Running | None:
        return self._running.get(position)

    def close(self, position: int) -> None:
        self._running.pop(position, None)

    def deliver(self, trajectory: Trajectory, attempt: int) -> Delivery:
        data = codec.encode(trajectory)  # before the mutex: producers share the work, and the sink stays short
        position, member = trajectory.position, trajectory.member
        with self._mutex:
            running = self._running.get(position)
            if running is None or running.attempt != attempt:
                return Delivery.REFUSED
            if not 0 <= member < running.members:
                raise QueueError(f"position {position} has {running.members} members, no member {member}")
            if member in running.delivered:
                return Delivery.DUPLICATE
            running.delivered[member] = (trajectory, data)
            return Delivery.COMPLETE if len(running.delivered) == running.members else Delivery.ACCEPTED
