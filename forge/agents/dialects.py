"""How a scaffold tells of tools, reads calls and brings results: by the API's own fields, or in the text.

A text dialect is an agent that brings its own format: the request names no tools, and the reply's text is parsed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forge.agents.context import Origin
from forge.formats import ToolCall, ToolFormat, ToolResult
from forge.formats import get as get_format
from forge.scaffolds import Scaffold
from forge.types import Json


@dataclass(frozen=True, slots=True)
class Fault:
    """What was wrong with a reply or a call: `kind` is counted, `reason` told to the policy."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A completion as the loop sees it. `message` goes into the context; `ids` are of its calls, if they have any."""

    message: Json
    text: str
    calls: tuple[ToolCall, ...] = ()
    ids: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one call."""

    call: ToolCall
    call_id: str
    text: str
    fault: Fault | None = None

    @property
    def fact(self) -> str:
        """Short, and without blanks: for a small vocabulary too."""
        try:
            found = json.loads(self.call.arguments)
        except (ValueError, RecursionError):
            found = self.call.arguments
        values = found.values() if isinstance(found, dict) else (found,)
        return f"{self.call.name}:{','.join(map(str, values))}={self.text}"


@dataclass(frozen=True, slots=True)
class Told:
    """A message for the context, with its origin and fact."""

    message: Json
    origin: Origin
    fact: str = ""


#: what stands before a result, of its tool's name
_LABELS = {"bare": "", "named": "{}: ", "equals": "{}="}


class Dialect(Protocol):
    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """For the system prompt."""
        ...

    def options(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
        """Fields of the request besides its messages."""
        ...

    def read(self, message: Any, tools: Sequence[Mapping[str, Any]]) -> Reply:
        """Never raises: what cannot be read is a fault of the reply."""
        ...

    def bring(self, results: Sequence[Result], faults: Sequence[Fault]) -> list[Told]:
        """Messages that bring results, and errors that belong to no call."""
        ...


class Native:
    """The API's `tools`, `tool_calls` and tool messages."""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:  # noqa: ARG002 - the request holds them
        return ""

    def options(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:
        if not tools:
            return {}
        return {"tools": list(tools)} if parallel else {"tools": list(tools), "parallel_tool_calls": False}

    def read(self, message: Any, tools: Sequence[Mapping[str, Any]]) -> Reply:  # noqa: ARG002
        calls = message.tool_calls or ()
        return Reply(
            message=message.model_dump(exclude_none=True),
            text=message.content or "",
            calls=tuple(ToolCall(call.function.name, call.function.arguments) for call in calls),
            ids=tuple(call.id for call in calls),
        )

    def bring(self, results: Sequence[Result], faults: Sequence[Fault]) -> list[Told]:
        told = [
            Told({"role": "tool", "tool_call_id": one.call_id, "content": one.text}, "tool", one.fact)
            for one in results
        ]
        return [*told, *(Told({"role": "user", "content": error(fault)}, "scaffold") for fault in faults)]


@dataclass(frozen=True)
class Text:
    """Calls as a format of forge.formats writes them; `results`: a name of forge.scaffolds.RESULTS."""

    format: ToolFormat
    results: str = "format"
    tells: bool = True

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        return self.format.describe([dict(tool) for tool in tools]) if tools and self.tells else ""

    def options(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any]:  # noqa: ARG002
        return {}

    def read(self, message: Any, tools: Sequence[Mapping[str, Any]]) -> Reply:
        said = message.content or ""
        stream = self.format.stream([dict(tool) for tool in tools])
        pieces = [*stream.feed(said), *stream.close()] if tools else [said]
        return Reply(
            message={"role": "assistant", "content": said},
            text="".join(piece for piece in pieces if isinstance(piece, str)),
            calls=tuple(piece for piece in pieces if isinstance(piece, ToolCall)),
            faults=tuple(Fault("malformed", f"the call cannot be read: {reason}") for reason in stream.reasons),
        )

    def bring(self, results: Sequence[Result], faults: Sequence[Fault]) -> list[Told]:
        parts = [self._shown(results)] if results else []
        content = "\n".join([*parts, *map(error, faults)])
        facts = "\n".join(one.fact for one in results)
        return [Told({"role": "user", "content": content}, "tool" if results else "scaffold", facts)]

    def _shown(self, results: Sequence[Result]) -> str:
        if self.results == "format":
            return self.format.render_results([ToolResult(one.call.name, one.text) for one in results])
        return "\n".join(_LABELS[self.results].format(one.call.name) + one.text for one in results)


def dialect_of(scaffold: Scaffold, *, tells: bool) -> Dialect:
    if not scaffold.format:
        return Native()
    return Text(get_format(scaffold.format), scaffold.results, tells)


def error(fault: Fault) -> str:
    return f"error: {fault.reason}"
