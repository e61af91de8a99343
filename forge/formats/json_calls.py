"""Calls as JSON objects, in tags, fences, lists or on their own. The arguments keep their very text.

These formats carry every call: any printable name, arguments of any depth and size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from forge.formats.base import Family, MalformedError, ToolCall, ToolResult, listing
from forge.formats.json_text import dump, elements, members, object_text
from forge.formats.scan import Balanced, UntilMark
from forge.formats.stream import BlockStream, Frame
from forge.types import Json

Keys = Literal[
    "name/arguments",
    "name/parameters",
    "name/input",
    "tool/args",
    "tool_name/parameters",
    "function/args",
    "action/action_input",
    "recipient_name/parameters",
]
#: between a key's colon and its value, between members, and around them
_SPACES = {"tight": (":", ",", ""), "spaced": (": ", ", ", ""), "lines": (": ", ",\n  ", "\n")}


@dataclass(frozen=True, kw_only=True)
class JsonFamily(Family):
    """`keys` of the name and the arguments; `args` as an object, or as a string that holds its text; `nest` puts both
    below `function`, as OpenAI's API does."""

    keys: Keys = "name/arguments"
    space: Literal["tight", "spaced", "lines"] = "spaced"
    args: Literal["object", "text"] = "object"
    nest: bool = False

    @property
    @abstractmethod
    def frame(self) -> Frame: ...

    @abstractmethod
    def blocks(self, calls: Sequence[str]) -> list[str]:
        """Blocks of calls that are written as objects."""
        ...

    @abstractmethod
    def objects(self, block: str) -> list[str]:
        """Texts of a block's objects. Raises ValueError."""
        ...

    @property
    def sensible(self) -> bool:
        return not self.nest or self.keys in ("name/arguments", "name/parameters")

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        return self.frame.join(content, self.blocks([self._object(call) for call in calls]) if calls else [])

    def stream(self, tools: Sequence[Json] = ()) -> BlockStream:  # noqa: ARG002 - JSON has types of its own
        return BlockStream(self.frame, self.read)

    def _object(self, call: ToolCall) -> str:
        name, arguments = self.keys.split("/")
        colon, comma, edge = _SPACES[self.space]
        told = call.arguments if self.args == "object" else dump(call.arguments)
        inner = {name: dump(call.name), arguments: told}
        if self.nest:
            written = comma.join(f'"{key}"{colon}{value}' for key, value in inner.items())
            inner = {"type": '"function"', "function": f"{{{written}}}"}
        written = comma.join(f'"{key}"{colon}{value}' for key, value in inner.items())
        return f"{{{edge}{'  ' if edge else ''}{written}{edge}}}"

    def may_be_call(self, block: str) -> bool:  # noqa: ARG002 - for those that know better
        """Whether a block that is no call is a broken one, and not just text."""
        return True

    def read(self, block: str) -> list[ToolCall]:
        if not self.may_be_call(block):
            return []
        try:
            return [self._call(text) for text in self.objects(block)]
        except ValueError as error:
            raise MalformedError(str(error)) from None

    def _call(self, text: str) -> ToolCall:
        """Unknown members are ignored; the last of a repeated one counts."""
        found = members(text)
        if self.nest:
            found = members(found.get("function", (None, ""))[1])
        name_key, arguments_key = self.keys.split("/")
        name, _ = found.get(name_key, (None, ""))
        arguments, text = found.get(arguments_key, (None, ""))
        if not text:
            raise MalformedError(f"no {arguments_key}")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise MalformedError(f"no {name_key}")
        told = arguments if self.args == "text" and isinstance(arguments, str) else text
        return ToolCall(name, object_text(told))


@dataclass(frozen=True, kw_only=True)
class Hermes(JsonFamily):
    """An object in tags, a tag a call, as Hermes, Qwen 2.5 and 3 and many others write it."""

    family: ClassVar[str] = "hermes"
    space: Literal["tight", "spaced", "lines"] = "tight"
    tag: Literal[
        "tool_call", "function_call", "tool_use", "tool", "action", "call", "invoke_tool", "longcat_tool_call"
    ] = "tool_call"
    pad: bool = False

    @property
    def frame(self) -> Frame:
        close = f"</{self.tag}>"
        return Frame(opener=f"<{self.tag}>", scanner=lambda: UntilMark(close, '"'))

    def blocks(self, calls: Sequence[str]) -> list[str]:
        edge = "\n" if self.pad else ""
        return [f"<{self.tag}>{edge}{call}{edge}</{self.tag}>" for call in calls]

    def objects(self, block: str) -> list[str]:
        return [_between(block, f"<{self.tag}>", f"</{self.tag}>")]

    def describe(self, tools: Sequence[Json]) -> str:
        if self == Hermes():
            return HERMES_PROMPT.format(tools=listing(tools))
        return super().describe(tools)


HERMES_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> tags:
<tool_call>{{"name":<function-name>,"arguments":<args-json-object>}}</tool_call>"""


@dataclass(frozen=True, kw_only=True)
class Bare(JsonFamily):
    """An object and nothing around it, as Llama 3 writes it, a line of its own, or behind its python tag."""

    family: ClassVar[str] = "json"
    keys: Keys = "name/parameters"
    prefix: Literal["none", "python_tag"] = "none"

    @property
    def frame(self) -> Frame:
        if self.prefix == "python_tag":
            return Frame(opener="<|python_tag|>", scanner=lambda: Balanced("{}", lines=0))
        key = "type" if self.nest else self.keys.split("/")[0]
        opener = "{" + ("\n  " if self.space == "lines" else "") + f'"{key}"'
        return Frame(opener=opener, scanner=lambda: Balanced("{}", depth=1), own_line=True)

    def blocks(self, calls: Sequence[str]) -> list[str]:
        return [self._prefix + call for call in calls]

    def objects(self, block: str) -> list[str]:
        return [_between(block, self._prefix, "")]

    @property
    def _prefix(self) -> str:
        return "<|python_tag|>" if self.prefix == "python_tag" else ""


@dataclass(frozen=True, kw_only=True)
class Fence(JsonFamily):
    """An object, or with `grouped` a list of them, in a Markdown fence of its own language."""

    family: ClassVar[str] = "fence"
    keys: Keys = "tool/args"
    language: Literal["json", "tool_call", "tool", "action", "call", "tool_json"] = "json"
    fence: Literal["backticks", "tildes"] = "backticks"
    grouped: bool = False

    @property
    def frame(self) -> Frame:
        return Frame(opener=self._opening, scanner=lambda: UntilMark(self._mark, '"'), own_line=True)

    def blocks(self, calls: Sequence[str]) -> list[str]:
        inside = [_listed(calls, self.space)] if self.grouped else calls
        return [f"{self._opening}{text}\n{self._mark}" for text in inside]

    def objects(self, block: str) -> list[str]:
        inside = _between(block, self._opening, self._mark)
        return elements(inside) if self.grouped else [inside]

    @property
    def _mark(self) -> str:
        return "```" if self.fence == "backticks" else "~~~"

    @property
    def _opening(self) -> str:
        return f"{self._mark}{self.language}\n"

    def may_be_call(self, block: str) -> bool:
        """Other JSON is shown in such fences too."""
        return self.language != "json" or f'"{self.keys.split("/")[0]}"' in block


@dataclass(frozen=True, kw_only=True)
class JsonList(JsonFamily):
    """All calls of a turn as one list behind or between marks: Nemotron, Jamba, Granite, Phi-4, Command A."""

    family: ClassVar[str] = "list"
    marks: Literal[
        "nemotron", "jamba", "granite", "granite_tag", "phi", "command", "plural", "functions", "calls", "hash"
    ] = "nemotron"

    @property
    def sensible(self) -> bool:
        return super().sensible and (self.args == "object" or not self.nest)

    @property
    def frame(self) -> Frame:
        opener, close = LIST_MARKS[self.marks]
        return Frame(opener=opener, scanner=lambda: UntilMark(close, '"') if close else Balanced("[]"))

    def blocks(self, calls: Sequence[str]) -> list[str]:
        opener, close = LIST_MARKS[self.marks]
        return [f"{opener}{_listed(calls, self.space)}{close}"]

    def objects(self, block: str) -> list[str]:
        return elements(_between(block, *LIST_MARKS[self.marks]))


LIST_MARKS = {
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "granite": ("<|tool_call|>", ""),
    "granite_tag": ("<tool_call>", ""),
    "phi": ("functools", ""),
    "command": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "plural": ("<|tool_calls|>", "<|/tool_calls|>"),
    "functions": ("<functions>", "</functions>"),
    "calls": ("<calls>", "</calls>"),
    "hash": ("#TOOLS#", "#END#"),
}


@dataclass(frozen=True, kw_only=True)
class MistralList(JsonFamily):
    """Mistral's `[TOOL_CALLS]` and a list, up to its v7 tokenizers. `gap` is the blank that its first ones wrote."""

    family: ClassVar[str] = "mistral"
    gap: bool = False

    @property
    def frame(self) -> Frame:
        return Frame(opener="[TOOL_CALLS]", scanner=lambda: Balanced("[]"), separator="")

    def blocks(self, calls: Sequence[str]) -> list[str]:
        return [f"[TOOL_CALLS]{' ' if self.gap else ''}{_listed(calls, self.space)}"]

    def objects(self, block: str) -> list[str]:
        return elements(_between(block, "[TOOL_CALLS]", ""))

    def render_results(self, results: Sequence[ToolResult]) -> str:
        return "".join(f"[TOOL_RESULTS]{dump({'content': one.content})}[/TOOL_RESULTS]" for one in results)


def _listed(calls: Sequence[str], space: str) -> str:
    inside = {"tight": ",", "spaced": ", ", "lines": ",\n"}[space].join(calls)
    return f"[\n{inside}\n]" if space == "lines" else f"[{inside}]"


def _between(block: str, opener: str, close: str) -> str:
    if not block.endswith(close):
        raise MalformedError("not closed")
    return block[len(opener) : len(block) - len(close)]
