"""The members of a run as its trace tells them: each one's requests in order, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from forge import trace as ev

ANSWERED = ("stop", "length")  # how a completion ends that was sampled to its end


@dataclass(slots=True)
class Ask:
    """One completed request. Seconds on the run's clock, counts in tokens."""

    turn: int
    routed_s: float
    prompt_tokens: int
    completed_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Path:
    """One member. `asks` are those answered in full; `done` is None where the trace ends before."""

    domain: str
    submitted_s: float
    asks: list[Ask] = field(default_factory=list)
    done: ev.MemberDone | None = None

    @property
    def survived(self) -> bool:
        return self.done is not None and self.done.reward is not None

    def tokens(self) -> int:
        return sum(ask.tokens for ask in self.asks)


@dataclass(slots=True)
class Paths:
    """Members of every item, by position, and the items' difficulties by domain."""

    items: dict[int, dict[int, Path]] = field(default_factory=dict)
    difficulties: dict[str, list[float]] = field(default_factory=dict)

    def of(self, domain: str) -> list[Path]:
        return [path for members in self.items.values() for path in members.values() if path.domain == domain]

    def all(self) -> list[Path]:
        return [path for members in self.items.values() for path in members.values()]

    def member(self, event: ev.Routed | ev.MemberDone) -> Path | None:
        """None where the trace lacks its submission: a life's last lines may be lost."""
        return self.items.get(event.position, {}).get(event.member)


def read_paths(events: Iterable[ev.Event]) -> Paths:
    paths = Paths()
    under_way: dict[str, tuple[Path, Ask]] = {}
    for event in events:
        match event:
            case ev.Submitted():
                members = range(event.members)
                paths.items[event.position] = {m: Path(event.domain, event.t) for m in members}
                paths.difficulties.setdefault(event.domain, []).append(event.difficulty)
            case ev.Routed():
                if path := paths.member(event):
                    under_way[event.request] = (path, Ask(event.turn, event.t, event.prompt_tokens))
            case ev.Completed() if event.request in under_way:
                path, ask = under_way.pop(event.request)
                ask.completed_s, ask.tokens = event.t, event.tokens
                if event.finish in ANSWERED:
                    path.asks.append(ask)
            case ev.MemberDone():
                if path := paths.member(event):
                    path.done = event
            case _:
                pass
    return paths
