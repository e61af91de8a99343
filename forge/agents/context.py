"""An agent's context as explicit state: an immutable list of entries, changed by registered operations alone.

What is served is a pure function of the opening and the operations so far, so a log of operations rebuilds every
request byte for byte (forge.agents.record). Operations speak of turns: a turn is a reply and all that follows it up to
the next one, so a call never stands without its results. Turn 0 is the opening, which nothing removes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from forge.types import Json

#: who an entry is from: the task, the policy, a tool, the scaffold, or an operation that wrote it in others' place
Origin = Literal["task", "policy", "tool", "scaffold", "summary"]

DROPPED = "..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A message. `fact`: of a tool's result, the call and what came of it, in a line; of a summary, its text."""

    turn: int
    origin: Origin
    message: Json
    fact: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """`entries` are served, ordered by turn; `archive` holds all that was ever appended, as it was. Neither they nor
    their messages are ever changed in place."""

    entries: tuple[Entry, ...]
    archive: tuple[Entry, ...]
    turn: int = 0

    @classmethod
    def begin(cls, opening: Sequence[Json]) -> Context:
        entries = tuple(Entry(turn=0, origin="task", message=message) for message in opening)
        return cls(entries=entries, archive=entries)

    @property
    def messages(self) -> list[Json]:
        return [entry.message for entry in self.entries]

    @property
    def turns(self) -> list[int]:
        """Those shown, after the opening."""
        return sorted({entry.turn for entry in self.entries if entry.turn})

    def of(self, turns: Sequence[int]) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.turn in turns)

    def without(self, turns: Sequence[int], instead: Sequence[Entry] = ()) -> Context:
        """These turns replaced by entries, whose turns say where they stand."""
        kept = [entry for entry in self.entries if entry.turn not in turns]
        return replace(self, entries=tuple(sorted([*kept, *instead], key=lambda entry: entry.turn)))

    def edited(self, edit: Callable[[Entry], str | None]) -> Context:
        """With another text in the tools' results for which `edit` gives one."""

        def changed(entry: Entry) -> Entry:
            text = edit(entry) if entry.origin == "tool" else None
            return entry if text is None else replace(entry, message=entry.message | {"content": text})

        return replace(self, entries=tuple(map(changed, self.entries)))


class Operation(Protocol):
    """A registered change of a context (forge.agents.operations). Pure; what it does not concern it leaves alone."""

    def apply(self, context: Context) -> Context: ...


def note(turns: Sequence[int], text: str) -> tuple[Entry, ...]:
    """What stands in the place of turns: a user's message; nothing where there is nothing to say."""
    if not text or not turns:
        return ()
    message = {"role": "user", "content": text}
    return (Entry(turn=turns[-1], origin="summary", message=message, fact=text),)


def digest(context: Context, turns: Sequence[int]) -> str:
    """What is known of these turns: of each its facts, a line each, or where it has none what the policy said."""
    return "\n".join(text for turn in turns if (text := _known(context.of([turn]))))


def _known(entries: Sequence[Entry]) -> str:
    known = [entry.fact for entry in entries if entry.fact]
    return "\n".join(known or [entry.message.get("content") or "" for entry in entries if entry.origin == "policy"])
