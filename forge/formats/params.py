"""A name and a list of arguments, each between marks of its own: the engine of the XML-like families.

These formats carry every call whose tool and arguments have names of letters, digits, `_`, `.` and `-`, the last two
not first (and, of Elements, other than the enclosing element's), with arguments nested a few hundred deep at most. A
string stands as it is where nothing else can be meant: one that holds an end mark or a control character, or that would
read as JSON (`5`, `true`, `"x"`), is written as a JSON string. A schema that names a string settles that too. Arguments
come back in JSON's own spelling, not byte for byte.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from forge.formats.base import CannotCarryError, Family, MalformedError, ToolCall, argument_types
from forge.formats.json_text import TooDeepError, dump, skip_space
from forge.formats.plain import NAME, Values, arguments_of, plain_name, read_value, stands, write_value
from forge.formats.scan import UntilMark
from forge.formats.stream import BlockStream, Frame
from forge.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamMarks:
    """`call` before the tool's name, behind it, and at the call's end; `param` before an argument's name, the marks
    between name and value, and behind the value; a `{}` in an end mark is the name. `grouped`: a section holds all
    calls of a turn, else one each; without a section the call's end mark ends the block. `gap` is written between
    parts, `pad` around values. `json_between`, where given, stands before values that are not strings."""

    section: tuple[str, str] = ("", "")
    grouped: bool = True
    call: tuple[str, str, str]
    param: tuple[str, tuple[str, ...], str]
    json_between: tuple[str, ...] = ()
    gap: str = "\n"
    pad: str = ""
    own_line: bool = False


@dataclass(frozen=True, kw_only=True)
class ParamFamily(Family):
    exact: ClassVar[bool] = False
    values: Values = "text"

    @property
    @abstractmethod
    def marks(self) -> ParamMarks: ...

    @property
    def notes(self) -> str:
        if self.marks.json_between or self.values == "json":
            return "Values that are not marked as text are JSON." if self.marks.json_between else "Values are JSON."
        escaped = ", with &lt; &gt; &amp; for < > &" if self.values == "escaped" else ""
        return f"Text is written as it is{escaped}, all else as JSON; text that reads as JSON is put in JSON's quotes."

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        marks = self.marks
        written = [self._written(marks, call) for call in calls]
        if marks.grouped and marks.section[0] and written:
            written = [_enclosed(marks, written)]
        elif marks.section[0]:
            written = [_enclosed(marks, [one]) for one in written]
        return self._frame(marks).join(content, written)

    def stream(self, tools: Sequence[Json] = ()) -> BlockStream:
        types = argument_types(tools)
        return BlockStream(self._frame(self.marks), lambda block: self._read(block, types))

    def _frame(self, marks: ParamMarks) -> Frame:
        close = marks.section[1] or marks.call[2]
        return Frame(
            opener=marks.section[0] or marks.call[0], scanner=lambda: UntilMark(close), own_line=marks.own_line
        )

    def _written(self, marks: ParamMarks, call: ToolCall) -> str:
        before, behind, end = marks.call
        name = self._carried(marks, call.name, "tool", end)
        parts = [f"{before}{name}{behind}"]
        try:
            parts += [self._param(marks, name, *one) for one in arguments_of(call, self.id).items()]
        except TooDeepError as error:
            raise CannotCarryError(f"tool format {self.id}: arguments of {name!r}: {error}") from None
        return marks.gap.join([*parts, end.replace("{}", name)] if end else parts)

    def _param(self, marks: ParamMarks, name: str, key: str, value: Any) -> str:
        before, between, _ = marks.param
        self._carried(marks, key, "argument", marks.param[2])
        end, ends = self._ends(marks, name, key)
        if not marks.json_between:
            told = write_value(value, self.values, ends)
        elif isinstance(value, str) and stands(value, ends):
            told = value
        else:
            between, told = marks.json_between, write_value(value, "json", ends)
        return f"{before}{key}{marks.gap.join(between)}{marks.pad}{told}{marks.pad}{end}"

    def _carried(self, marks: ParamMarks, name: str, what: str, end: str) -> str:
        if end.replace("{}", name) == marks.section[1]:
            raise CannotCarryError(f"tool format {self.id}: {what} {name!r} is the name of what encloses the call")
        return plain_name(name, what, self.id)

    def _ends(self, marks: ParamMarks, name: str, key: str) -> tuple[str, tuple[str, ...]]:
        """A value's end mark, and all marks that it must not hold."""
        end = marks.param[2].replace("{}", key)
        return end, (end, marks.section[1] or marks.call[2].replace("{}", name))

    def _read(self, block: str, types: Mapping[str, Mapping[str, str]]) -> list[ToolCall]:
        marks = self.marks
        opener, close = marks.section
        at, calls = len(opener), list[ToolCall]()
        while not calls or (opener and marks.grouped and not block.startswith(close, at)):
            call, at = self._call(block, at, types)
            calls.append(call)
            at = skip_space(block, at)
        if block[at:] != close:
            raise MalformedError("more after the call")
        return calls

    def _call(self, block: str, at: int, types: Mapping[str, Mapping[str, str]]) -> tuple[ToolCall, int]:
        """The call that begins there, and where it ends."""
        marks = self.marks
        before, behind, end = marks.call
        name, at = _name(block, _expect(block, skip_space(block, at), before))
        at = _expect(block, at, behind)
        end = end.replace("{}", name) or marks.section[1]
        arguments: dict[str, Any] = {}
        while not block.startswith(end, at := skip_space(block, at)):
            key, at = _name(block, _expect(block, at, marks.param[0]))
            arguments[key], at = self._value(block, at, name, key, types.get(name, {}).get(key))
        at += len(end) if marks.call[2] else 0
        try:
            return ToolCall(name, dump(arguments)), at
        except TooDeepError as error:
            raise MalformedError(str(error)) from None

    def _value(self, block: str, at: int, name: str, key: str, kind: str | None) -> tuple[Any, int]:
        marks = self.marks
        end, ends = self._ends(marks, name, key)
        is_json = bool(marks.json_between) and block.startswith(marks.json_between[0], at)
        for index, mark in enumerate(marks.json_between if is_json else marks.param[1]):
            at = _expect(block, skip_space(block, at) if index else at, mark)
        stop = block.find(end, at)
        if stop < 0:
            raise MalformedError(f"no {end.strip() or 'line end'} after the value of {key}")
        text = block[at:stop]
        if marks.pad:
            text = text.removeprefix(marks.pad).removesuffix(marks.pad)
        if marks.json_between and not is_json:
            return text, stop + len(end)
        return read_value(text, "json" if is_json else self.values, ends, kind), stop + len(end)


def _enclosed(marks: ParamMarks, calls: Sequence[str]) -> str:
    opener, close = marks.section
    if not marks.call[0]:  # the name follows the section's own mark at once
        return opener + marks.gap.join([*calls, close])
    return marks.gap.join([opener, *calls, close])


def _expect(block: str, at: int, mark: str) -> int:
    """Index behind a mark that must come next."""
    if not block.startswith(mark, at):
        raise MalformedError(f"expected {mark}")
    return at + len(mark)


def _name(block: str, at: int) -> tuple[str, int]:
    found = NAME.match(block, at)
    if not found:
        raise MalformedError("no name")
    return found.group(), found.end()
