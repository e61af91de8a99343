"""What becomes of a context before each request: the operations of a scaffold's context strategy, or the policy's own.

With the strategy `own`, context management is an action of the policy: operations are tools that it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forge.agents.context import Operation
from forge.agents.operations import (
    DropResults,
    Edit,
    Extract,
    Fold,
    FoldEach,
    Restore,
    Summarise,
    Truncate,
    Window,
)
from forge.agents.record import Conversation
from forge.domains.base import ToolError
from forge.domains.tools import function_schema, string_arguments

#: operations by a strategy's kind; `all` and `own` have none, `cut` cuts results before they come into the context,
#: `summarise` asks the policy first
RULES: dict[str, Callable[[int], Operation]] = {
    "window": lambda size: Window(turns=size),
    "drop": lambda size: DropResults(keep=size),
    "extract": lambda size: Extract(keep=size),
    "fold": lambda size: FoldEach(keep=size),
}

_TURNS = "`turns` is how many, in digits."
OWN_TOOLS = [
    function_schema("context_drop", f"Forget your oldest turns. {_TURNS}", "turns"),
    function_schema("context_restore", f"See dropped or changed turns again, newest first. {_TURNS}", "turns"),
    function_schema("context_fold", f"Put a text in the place of your last turns. {_TURNS}", "turns", "text"),
    function_schema("context_edit", f"Let the results of your last turns read as this text. {_TURNS}", "turns", "text"),
    function_schema("context_summarise", "Put a text in the place of all turns so far.", "text"),
]
OWN_NAMES = tuple(str(tool["function"]["name"]) for tool in OWN_TOOLS)


def own_operation(talk: Conversation, name: str, arguments: Mapping[str, Any]) -> Operation:
    """What a call of one of OWN_TOOLS asks for. It will be applied once the turn that asked is complete, and spares
    that turn where it drops, summarises or edits. Raises ToolError."""
    match name:
        case "context_drop":
            return Truncate(turns=min(_count(*string_arguments(arguments, "turns")), len(talk.context.turns) - 1))
        case "context_restore":
            return Restore(turns=_count(*string_arguments(arguments, "turns")))
        case "context_fold":
            turns, text = string_arguments(arguments, "turns", "text")
            return Fold(turns=_count(turns) + 1, text=text)
        case "context_edit":
            turns, text = string_arguments(arguments, "turns", "text")
            return Edit(turns=_count(turns) + 1, text=text)
        case _:
            (text,) = string_arguments(arguments, "text")
            return Summarise(keep=1, text=text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text[:9]) < 10**6:
        raise ToolError("turns is not a whole number above 0")
    return int(text[:9])
