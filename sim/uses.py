"""Who may come back to which prefix: sessions under way by the chains they asked with."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from forge.policies.kv import ChainView, KvRetention
from sim.sessions import Path


class Uses:
    """`forget` is told the chains that the policy gives up, when a session is over."""

    def __init__(self, policy: KvRetention, forget: Callable[[list[int]], None]) -> None:
        self._policy = policy
        self._forget = forget
        self._chains: dict[Hashable, dict[int, None]] = {}  # by session, in the order of its paths
        self._sessions: dict[int, int] = {}  # by chain

    def asks(self, session: Hashable, path: Path) -> None:
        chains = self._chains.setdefault(session, {})
        for chain, _ in path:
            if chain not in chains:
                chains[chain] = None
                self._sessions[chain] = self._sessions.get(chain, 0) + 1

    def over(self, session: Hashable) -> None:
        """It asks no more. What hangs on a chain is forgotten before it."""
        forgotten = []
        for chain in reversed(self._chains.pop(session, {})):
            self._sessions[chain] -= 1
            if self._policy.forgets(ChainView(sessions=self._sessions[chain])):
                forgotten.append(chain)
            if not self._sessions[chain]:
                del self._sessions[chain]
        if forgotten:
            self._forget(forgotten)
