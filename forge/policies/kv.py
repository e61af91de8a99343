"""KV retention: which blocks of prefixes instances and tiers give up first, and which are kept beneath them at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from forge.policies.scheduler import FORBID


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainView:
    """A run of blocks that prompts share. `sessions`: trajectories under way that have asked with it. Whoever stands
    before the engines knows them: an agent ends, a group's prompt has members that still run."""

    sessions: int


class KvRetention(Protocol):
    """Contract: `forgets` is a pure function of the view, asked whenever a session that used a chain is over; neither
    traced nor given a draw. True: its blocks are evicted before all others once no request holds them, and go to no
    tier below; until somebody asks with the chain again."""

    def forgets(self, view: ChainView) -> bool: ...


@dataclass(kw_only=True)
class Lru:
    """Least recently used first, whoever may come back; what instances evict goes to the tiers below."""

    __pydantic_config__ = FORBID
    kind: Literal["lru"] = "lru"

    def forgets(self, view: ChainView) -> bool:  # noqa: ARG002 - the slot's signature
        return False


@dataclass(kw_only=True)
class ComesBack:
    """First what no session under way has used: an agent that waits for its tool comes back, one that ended does not,
    and a group's prompt is asked for until its last member ends. Among the others least recently used first."""

    __pydantic_config__ = FORBID
    kind: Literal["comes_back"] = "comes_back"

    def forgets(self, view: ChainView) -> bool:
        return view.sessions == 0
