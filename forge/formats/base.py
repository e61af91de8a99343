"""What a tool-call format is: the protocol, and the base of the families that implement it."""

from __future__ import annotations

import itertools
import json
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, Self

from forge.types import ForgeError, Json


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object: byte for byte as the policy wrote it where the format holds JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """`name` is that of the tool that was called; "" where the conversation does not say."""

    name: str
    content: str


Piece = str | ToolCall
#: the JSON type that a tool's schema gives an argument: tool name -> argument name -> type
ArgumentTypes = Mapping[str, Mapping[str, str]]


class CannotCarryError(ForgeError):
    """This format has no way to write such a call. Which calls those are, each family's docstring says."""


class MalformedError(ValueError):
    """A block that begins like a call and is none; says why. Never leaves a stream."""


class ToolStream(Protocol):
    """Turns a reply's text, as it arrives, into pieces in order. `feed` after `close` is an error of ours.

    Whatever the text and however it is cut, nothing raises, and text plus what calls were read from is all of it but
    separators. `reasons` says of every block that began like a call and was none why; such a block comes back as text.
    """

    reasons: list[str]

    @property
    def malformed(self) -> int: ...

    def feed(self, text: str) -> list[Piece]: ...

    def close(self) -> list[Piece]: ...


class ToolFormat(Protocol):
    """How a model is told of tools, writes calls and reads results, all in plain text.

    The law: for calls that it carries, and content in which no block begins, reading what `render` wrote gives both
    back, whole or in any chunks: names alike, arguments equal as JSON values with their types, and byte for byte where
    `exact`.
    """

    @property
    def id(self) -> str:
        """Stable and readable: the family, then the fields that are not its defaults."""
        ...

    @property
    def exact(self) -> bool: ...

    def describe(self, tools: Sequence[Json]) -> str:
        """What the system prompt says of the tools and of how to call them."""
        ...

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        """The text of an assistant's turn. Raises CannotCarryError."""
        ...

    def render_results(self, results: Sequence[ToolResult]) -> str:
        """The text of the user's turn that brings a turn's results back."""
        ...

    def stream(self, tools: Sequence[Json] = ()) -> ToolStream:
        """A fresh parser of one reply. A schema among `tools` settles what an untyped text stands for."""
        ...


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """A family's fields are literals and booleans; every combination that is `sensible` is a format of its own."""

    family: ClassVar[str]
    exact: ClassVar[bool] = True

    @classmethod
    def variants(cls) -> Iterator[Self]:
        hints = typing.get_type_hints(cls)
        named = {
            f.name: (False, True) if hints[f.name] is bool else typing.get_args(hints[f.name]) for f in fields(cls)
        }
        for values in itertools.product(*named.values()):
            one = cls(**dict(zip(named, values, strict=True)))
            if one.sensible:
                yield one

    @property
    def sensible(self) -> bool:
        """Whether this combination of fields is a format, and not another one's double."""
        return True

    @property
    def notes(self) -> str:
        """What the description adds on how arguments are written."""
        return ""

    @property
    def id(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        words = {True: "yes", False: "no"}
        pairs = ",".join(f"{key}={words[value] if isinstance(value, bool) else value}" for key, value in told.items())
        return f"{self.family}:{pairs}" if pairs else self.family

    @abstractmethod
    def render(self, content: str, calls: Sequence[ToolCall]) -> str: ...

    @abstractmethod
    def stream(self, tools: Sequence[Json] = ()) -> ToolStream: ...

    def describe(self, tools: Sequence[Json]) -> str:
        one = ToolCall("example_tool", '{"first": "some text", "second": 2}')
        example = self.render("", [one])
        return DESCRIPTION.format(tools=listing(tools), example=example, notes=f"\n{self.notes}" if self.notes else "")

    def render_results(self, results: Sequence[ToolResult]) -> str:
        return "\n".join(f"<tool_response>\n{result.content}\n</tool_response>" for result in results)


DESCRIPTION = """# Tools

You may call tools. These exist, one JSON description a line:
<tools>
{tools}
</tools>

To call one, write exactly this, here for a tool `example_tool` with the arguments `first` and `second`:
{example}{notes}
Several calls follow one another in the same way. Results come back in the next message."""


def listing(tools: Sequence[Json]) -> str:
    return "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)


def argument_types(tools: Sequence[Json]) -> ArgumentTypes:
    """Of tools as clients send them, whatever else their schemas hold."""
    types: dict[str, dict[str, str]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        named = properties.items() if isinstance(properties, dict) else ()
        told = {key: schema["type"] for key, schema in named if isinstance(schema, dict) and "type" in schema}
        types[str(function.get("name"))] = {key: kind for key, kind in told.items() if isinstance(kind, str)}
    return types
