"""A name between marks, then the arguments as one JSON object, whose text is kept: the engine.

These formats carry every call whose name is letters, digits, `_`, `.` and `-`, the last two not first.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from forge.formats.base import Family, MalformedError, ToolCall
from forge.formats.json_text import raw, skip_space
from forge.formats.plain import NAME, plain_name
from forge.formats.scan import Balanced, UntilMark
from forge.formats.stream import BlockStream, Frame
from forge.types import Json

_NUMBER = re.compile(r"\w*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """`before` the name, there `scope`; `between` it and the arguments; `after` them. A `{}` in `between` is the call's
    number. `section` holds all calls of a turn; two empty strings: every call is a block of its own. `gap` is written
    between its calls. With `brackets` a block ends where the first of them closes, not with `after`. White space beside
    marks does not count when reading."""

    section: tuple[str, str] = ("", "")
    before: str
    scope: str = ""
    between: str
    after: str = ""
    gap: str = ""
    brackets: str = ""
    separator: str = "\n"
    own_line: bool = False
    may_end: bool = False


class NamedFamily(Family):
    @property
    @abstractmethod
    def marks(self) -> Marks: ...

    @property
    def strict(self) -> bool:
        """Whether a block that does not go on like a call is a broken one, and not just text."""
        return True

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        marks = self.marks
        written = [self._written(call, number) for number, call in enumerate(calls)]
        if marks.section[0] and calls:
            written = [marks.section[0] + marks.gap.join(written) + marks.section[1]]
        return self._frame(marks).join(content, written)

    def stream(self, tools: Sequence[Json] = ()) -> BlockStream:  # noqa: ARG002 - JSON has types of its own
        return BlockStream(self._frame(self.marks), self._read)

    def _frame(self, marks: Marks) -> Frame:
        close = marks.section[1] or marks.after
        lines = 2 * marks.between.count("\n")  # so many more do models write
        bracketed = marks.brackets or not close
        return Frame(
            # a quote is the scanner's, as the one behind the name is
            opener=marks.section[0] or marks.before.rstrip('"'),
            scanner=lambda: Balanced(marks.brackets or "{}", lines=lines) if bracketed else UntilMark(close, '"'),
            separator=marks.separator,
            own_line=marks.own_line,
            may_end=marks.may_end,
        )

    def _written(self, call: ToolCall, number: int) -> str:
        marks = self.marks
        name = plain_name(call.name, "tool", self.id)
        return (
            f"{marks.before}{marks.scope}{name}{marks.between.replace('{}', str(number))}{call.arguments}{marks.after}"
        )

    def _read(self, block: str) -> list[ToolCall]:
        marks = self.marks
        if not self.strict and not self._begins_call(block):
            return []
        opener, close = marks.section
        at, calls = len(opener), list[ToolCall]()
        while not calls or (opener and not block.startswith(close, at)):
            call, at = self._call(block, at)
            calls.append(call)
            at = skip_space(block, at)
        if block[at:] != close:
            raise MalformedError("more after the call")
        return calls

    def _begins_call(self, block: str) -> bool:
        name = NAME.match(block, len(self.marks.before))
        goes_on = re.compile(rf"\s*{re.escape(self.marks.between.strip())}\s*{{\s*[\"}}]")
        return bool(name and goes_on.match(block, name.end()))

    def _call(self, block: str, at: int) -> tuple[ToolCall, int]:
        """The call that begins there, and where it ends."""
        marks = self.marks
        at = _expect(block, _expect(block, at, marks.before), marks.scope)
        name = NAME.match(block, at)
        if not name:
            raise MalformedError("no name")
        start, _, end = marks.between.partition("{}")
        at = _expect(block, name.end(), start)
        if end:
            number = _NUMBER.match(block, at)
            at = _expect(block, number.end() if number else at, end)
        try:
            arguments, behind = raw(block, at)
        except ValueError as error:
            raise MalformedError(f"arguments: {error}") from None
        if not isinstance(arguments, dict):
            raise MalformedError("the arguments are no JSON object")
        text, at = block[at:behind], skip_space(block, behind)
        if marks.after and not (marks.may_end and at == len(block)):
            at = _expect(block, at, marks.after)
        return ToolCall(name.group(), text), at


def _expect(block: str, at: int, mark: str) -> int:
    """Index of the first non-space behind a mark that must come next; white space around it does not count."""
    at, mark = skip_space(block, at), mark.strip()
    if not block.startswith(mark, at):
        raise MalformedError(f"expected {mark}")
    return skip_space(block, at + len(mark))
