"""The context operations there are, by name: each a keyword-only dataclass that is its own record.

Adding one: a class, an entry in OPERATIONS.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from forge.agents.context import DROPPED, Context, Entry, Operation, Origin, digest, note
from forge.types import ForgeError, Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """A message at the end. The policy's begins a turn."""

    message: Json
    origin: Origin
    fact: str = ""

    def apply(self, context: Context) -> Context:
        turn = context.turn + (self.origin == "policy")
        entry = Entry(turn=turn, origin=self.origin, message=self.message, fact=self.fact)
        return Context(entries=(*context.entries, entry), archive=(*context.archive, entry), turn=turn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The opening and the last `turns`."""

    turns: int

    def apply(self, context: Context) -> Context:
        return context.without(older(context, self.turns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncate:
    """The oldest `turns` shown are dropped."""

    turns: int

    def apply(self, context: Context) -> Context:
        return context.without(context.turns[: self.turns])


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """The newest `turns` of those not shown as they were come back so, in their places; notes there go."""

    turns: int

    def apply(self, context: Context) -> Context:
        was: dict[int, tuple[Entry, ...]] = {}
        for entry in context.archive:
            was[entry.turn] = (*was.get(entry.turn, ()), entry)
        changed = [turn for turn, entries in was.items() if context.of([turn]) != entries][-self.turns :]
        return context.without(changed, [entry for turn in changed for entry in was[turn]])


@dataclass(frozen=True, slots=True, kw_only=True)
class DropResults:
    """Results older than the last `keep` turns give way to a mark; their calls stay."""

    keep: int

    def apply(self, context: Context) -> Context:
        old = older(context, self.keep)
        return context.edited(lambda entry: DROPPED if entry.turn in old else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extract:
    """Turns older than the last `keep` become one note of what was called and what came of it."""

    keep: int

    def apply(self, context: Context) -> Context:
        old = older(context, self.keep)
        return context.without(old, note(old, digest(context, old)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldEach:
    """Every turn older than the last `keep` becomes a note of its own."""

    keep: int

    def apply(self, context: Context) -> Context:
        old = older(context, self.keep)
        return context.without(old, [one for turn in old for one in note([turn], digest(context, [turn]))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """The last `turns` become a note with this text: a sub-task that is done."""

    turns: int
    text: str

    def apply(self, context: Context) -> Context:
        last = context.turns[-self.turns :]
        return context.without(last, note(last, self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summarise:
    """Turns older than the last `keep` become a note with this text, by whoever wrote it."""

    keep: int
    text: str

    def apply(self, context: Context) -> Context:
        old = older(context, self.keep)
        return context.without(old, note(old, self.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """The results of the last `turns` shown read otherwise."""

    turns: int
    text: str

    def apply(self, context: Context) -> Context:
        last = context.turns[-self.turns :]
        return context.edited(lambda entry: self.text if entry.turn in last else None)


OPERATIONS: Mapping[str, type[Any]] = {
    "append": Append,
    "window": Window,
    "truncate": Truncate,
    "restore": Restore,
    "drop_results": DropResults,
    "extract": Extract,
    "fold_each": FoldEach,
    "fold": Fold,
    "summarise": Summarise,
    "edit": Edit,
}
_NAMES = {kind: name for name, kind in OPERATIONS.items()}


def older(context: Context, keep: int) -> list[int]:
    """Turns shown before the last `keep`."""
    turns = context.turns
    return turns[: max(0, len(turns) - keep)]


def to_row(operation: Operation) -> Json:
    """As JSON, `op` its name."""
    return {"op": _NAMES[type(operation)], **asdict(operation)}  # type: ignore[call-overload]


def from_row(row: Mapping[str, Any]) -> Operation:
    """Raises ForgeError for what no operation is."""
    fields = dict(row)
    name = fields.pop("op", None)
    try:
        made: Operation = OPERATIONS[str(name)](**fields)
    except (KeyError, TypeError) as error:
        raise ForgeError(f"context operation {name!r} with {sorted(fields)}: there is none such: {error}") from None
    return made
