"""A name between marks, then the arguments as one JSON object, whose text is kept.

These formats carry every call whose name is letters, digits, `_`, `.` and `-`, the last two not first.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from forge.formats.base import Family, MalformedError, ToolCall, ToolResult
from forge.formats.json_text import dump, raw, skip_space
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


@dataclass(frozen=True, kw_only=True)
class DeepSeek(NamedFamily):
    """DeepSeek V3 and R1 (`version=v3`, with a fence), and V3.1."""

    family: ClassVar[str] = "deepseek"
    version: Literal["v3", "v3.1"] = "v3.1"
    bars: Literal["wide", "ascii"] = "wide"
    words: Literal["joined", "underscored"] = "joined"

    @property
    def marks(self) -> Marks:
        kind, between, after = ("function", "\n```json\n", "\n```") if self.version == "v3" else ("", "", "")
        sep = self._token("tool sep")
        return Marks(
            section=(self._token("tool calls begin"), self._token("tool calls end")),
            before=self._token("tool call begin") + (kind + sep if kind else ""),
            between=between if kind else sep,
            after=after + self._token("tool call end"),
            gap="\n" if kind else "",
            separator="",
        )

    def _token(self, words: str) -> str:
        bar, joint = "｜" if self.bars == "wide" else "|", "▁" if self.words == "joined" else "_"
        return f"<{bar}{words.replace(' ', joint)}{bar}>"

    def render_results(self, results: Sequence[ToolResult]) -> str:
        begin, end = self._token("tool output begin"), self._token("tool output end")
        return "".join(f"{begin}{one.content}{end}" for one in results)


@dataclass(frozen=True, kw_only=True)
class Kimi(NamedFamily):
    """Kimi K2: the name is part of the call's id."""

    family: ClassVar[str] = "kimi"
    scope: Literal["functions.", "tools.", "none"] = "functions."
    number: Literal["colon", "hash", "none"] = "colon"
    section: Literal["tool_calls_section", "tool_call_section"] = "tool_calls_section"
    gap: bool = False

    @property
    def marks(self) -> Marks:
        number = {"colon": ":{}", "hash": "#{}", "none": ""}[self.number]
        return Marks(
            section=(f"<|{self.section}_begin|>", f"<|{self.section}_end|>"),
            before="<|tool_call_begin|>",
            scope="" if self.scope == "none" else self.scope,
            between=f"{number}<|tool_call_argument_begin|>",
            after="<|tool_call_end|>",
            gap="\n" if self.gap else "",
            separator="",
        )

    def render_results(self, results: Sequence[ToolResult]) -> str:
        return "\n".join(f"## Return of {one.name}\n{one.content}" for one in results)


@dataclass(frozen=True, kw_only=True)
class MistralArgs(NamedFamily):
    """Mistral since its v11 tokenizer: a mark, a name, a mark, the arguments, for every call."""

    family: ClassVar[str] = "mistral_args"
    args: Literal["tight", "spaced", "none"] = "tight"
    ids: bool = False

    @property
    def marks(self) -> Marks:
        number = "[CALL_ID]{}" if self.ids else ""
        args = {"tight": "[ARGS]", "spaced": "[ARGS] ", "none": ""}[self.args]
        return Marks(before="[TOOL_CALLS]", between=number + args, separator="")

    @property
    def sensible(self) -> bool:
        return self.args != "none" or not self.ids

    def render_results(self, results: Sequence[ToolResult]) -> str:
        return "".join(f"[TOOL_RESULTS]{one.content}[/TOOL_RESULTS]" for one in results)


@dataclass(frozen=True, kw_only=True)
class Harmony(NamedFamily):
    """gpt-oss: a message to a recipient. `order`: whether the recipient follows the channel or precedes it. The end of
    the reply ends a call too, as its mark is a stop token."""

    family: ClassVar[str] = "harmony"
    order: Literal["channel", "recipient"] = "channel"
    channel: Literal["commentary", "analysis"] = "commentary"
    scope: Literal["functions.", "tools.", "none"] = "functions."
    kind: Literal["constrain", "json", "none"] = "constrain"

    @property
    def marks(self) -> Marks:
        scope = "" if self.scope == "none" else self.scope
        kind = {"constrain": " <|constrain|>json", "json": " json", "none": ""}[self.kind]
        if self.order == "channel":
            before, between = f"<|channel|>{self.channel} to=", f"{kind}<|message|>"
        else:
            before, between = "<|start|>assistant to=", f"<|channel|>{self.channel}{kind}<|message|>"
        return Marks(before=before, scope=scope, between=between, after="<|call|>", separator="", may_end=True)


@dataclass(frozen=True, kw_only=True)
class FunctionTag(NamedFamily):
    """Llama 3.1's custom tools: the name in the opening tag, the arguments inside."""

    family: ClassVar[str] = "function_tag"
    tag: Literal["function", "tool", "call", "invoke", "action"] = "function"
    name: Literal["equals", "quoted", "attribute", "apostrophes", "colon"] = "equals"
    pad: bool = False

    @property
    def marks(self) -> Marks:
        opening, closing = {
            "equals": ("=", ">"),
            "quoted": ('="', '">'),
            "attribute": (' name="', '">'),
            "apostrophes": (" name='", "'>"),
            "colon": (":", ">"),
        }[self.name]
        edge = "\n" if self.pad else ""
        return Marks(
            before=f"<{self.tag}{opening}", between=closing + edge, after=f"{edge}</{self.tag}>", separator="\n"
        )


@dataclass(frozen=True, kw_only=True)
class ReAct(NamedFamily):
    """Thought, action, observation, in lines: the thought is the content. An action's line without an input below is a
    broken call."""

    family: ClassVar[str] = "react"
    words: Literal[
        "Action/Action Input", "Action/Input", "Tool/Tool Input", "Tool/Arguments", "Act/Args", "Call/With"
    ] = "Action/Action Input"
    style: Literal["plain", "bold", "heading", "lower", "upper"] = "plain"
    shape: Literal["lines", "blank", "brackets", "parentheses"] = "lines"

    @property
    def marks(self) -> Marks:
        action, inputs = (self._label(word) for word in self.words.split("/"))
        if self.shape in ("brackets", "parentheses"):
            opening, closing = "[]" if self.shape == "brackets" else "()"
            return Marks(before=action, between=opening, after=closing, brackets=opening + closing, own_line=True)
        return Marks(before=action, between=("\n\n" if self.shape == "blank" else "\n") + inputs, own_line=True)

    @property
    def sensible(self) -> bool:
        """Two sets of words differ in the input's alone, which brackets do not name."""
        return self.shape in ("lines", "blank") or self.words not in ("Action/Input", "Tool/Arguments")

    def _label(self, word: str) -> str:
        return {
            "plain": f"{word}: ",
            "bold": f"**{word}:** ",
            "heading": f"### {word}\n",
            "lower": f"{word.lower()}: ",
            "upper": f"{word.upper()}: ",
        }[self.style]

    def render_results(self, results: Sequence[ToolResult]) -> str:
        return "\n".join(f"{self._label('Observation')}{one.content}" for one in results)


@dataclass(frozen=True, kw_only=True)
class Command(NamedFamily):
    """A line that begins with a sign or a verb, a name, and the arguments: `@name({...})`, `/name {...}`,
    `call name: {...}`. A line that only begins so is text."""

    family: ClassVar[str] = "command"
    sign: Literal["at", "slash", "bang", "dollar", "prompt", "call", "run", "use", "invoke", "tool"] = "at"
    shape: Literal["parentheses", "blank", "colon", "arrow"] = "parentheses"

    @property
    def marks(self) -> Marks:
        signs = {"at": "@", "slash": "/", "bang": "!", "dollar": "$", "prompt": ">>> "}
        between = {"parentheses": "(", "blank": " ", "colon": ": ", "arrow": " <- "}[self.shape]
        after, brackets = (")", "()") if self.shape == "parentheses" else ("", "{}")
        return Marks(
            before=signs.get(self.sign, f"{self.sign} "), between=between, after=after, brackets=brackets, own_line=True
        )

    @property
    def strict(self) -> bool:
        return False

    def render_results(self, results: Sequence[ToolResult]) -> str:
        return "\n".join(f"{one.name} returned {dump(one.content)}" for one in results)
