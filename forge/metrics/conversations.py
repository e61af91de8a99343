"""How agents' requests fitted together, over all trajectories of a run that ended: a fold over its trace."""

from __future__ import annotations

from collections import Counter

from forge import trace as ev


class Conversations:
    """`forks` and `echoes` by kind (forge.gateway.recovery), summed over `members` trajectories."""

    def __init__(self) -> None:
        self.members = 0
        self.forks: Counter[str] = Counter()
        self.echoes: Counter[str] = Counter()

    def apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.Conversed):
            self.members += 1
            self.forks.update(event.forks)
            self.echoes.update(event.echoes)
