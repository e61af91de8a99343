"""The record of a trajectory's contexts, and every request rebuilt from it.

    {"conversations": [{"opening": [message, ...], "log": [operation, ...]}, ...], "served": [[conversation, n], ...]}

Request k, in the order in which they were sent, showed conversation `served[k][0]` after its first n operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge.agents.context import Context, Operation
from forge.agents.operations import Append, from_row, to_row
from forge.types import Json


class Conversation:
    """A context under way. Whatever `do` changes is logged; what changes nothing is not."""

    def __init__(self, number: int, opening: Sequence[Json]) -> None:
        self.number = number
        self.opening = tuple(opening)
        self.context = Context.begin(opening)
        self.log: list[Operation] = []

    def do(self, operation: Operation) -> None:
        changed = operation.apply(self.context)
        if changed != self.context:
            self.log.append(operation)
            self.context = changed


def record(conversations: Sequence[Conversation], served: Sequence[tuple[int, int]]) -> Json | None:
    """None where every context only ever grew: its last request then holds them all."""
    if all(isinstance(one, Append) for talk in conversations for one in talk.log):
        return None
    talks = [{"opening": list(talk.opening), "log": [to_row(one) for one in talk.log]} for talk in conversations]
    return {"conversations": talks, "served": [list(one) for one in served]}


def rebuild(recorded: Mapping[str, Any]) -> list[list[Json]]:
    """The messages of every request, in the order in which they were sent. Raises ForgeError for unknown operations."""
    shown = [_states(talk) for talk in recorded["conversations"]]
    return [shown[talk][operations] for talk, operations in recorded["served"]]


def _states(talk: Mapping[str, Any]) -> list[list[Json]]:
    """What is served after none, one, two, ... of a conversation's operations."""
    context = Context.begin(talk["opening"])
    states = [context.messages]
    for row in talk["log"]:
        context = from_row(row).apply(context)
        states.append(context.messages)
    return states
