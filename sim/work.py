"""What an item and its members will do: the hidden truth that no policy sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from forge.types import DeathReason
from sim.sessions import Step


@dataclass(frozen=True, slots=True)
class MemberWork:
    """One agent. `death`: why it died after the last of `steps` instead of answering; `reward` then does not count.

    `timeouts`: tool calls that failed so. `idle_s`: from its last answer to its end, where a tool's time-out kills it.
    """

    steps: tuple[Step, ...]
    reward: float
    death: DeathReason | None = None
    timeouts: int = 0
    idle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """One item: its members try the same task."""

    domain: str
    difficulty: float
    members: tuple[MemberWork, ...]


class Work(Protocol):
    """The work behind every position of a scenario, whatever its queue and policies: a pure function of seed and
    position, so that two policies meet the very same work, whatever order things happen in.

    `block`: tokens of the KV blocks that paths count. `domain`: of the item; by default the one the mix gives it.
    """

    @property
    def block(self) -> int: ...

    def item(self, position: int, domain: str | None = None) -> Group: ...
