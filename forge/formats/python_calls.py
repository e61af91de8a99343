"""Calls as Python writes them: Llama 3.2 and 4, Gemma, LFM2, Olmo 3.

They carry every call whose tool is an identifier, or identifiers with dots between, of arguments at most 100 deep; an
argument whose name is no identifier goes into a `**{...}`. Arguments come back in JSON's own spelling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import ClassVar, Literal

from forge.formats import python_text
from forge.formats.base import CannotCarryError, Family, MalformedError, ToolCall, ToolResult
from forge.formats.json_text import TooDeepError, dump
from forge.formats.plain import arguments_of
from forge.formats.scan import Balanced, UntilMark
from forge.formats.stream import BlockStream, Frame
from forge.types import Json

#: opener, end, between calls, whether it begins a line; an end of "" is the list's own bracket
_WRAPS = {
    "list": ("[", "]", ", ", True),
    "python_start": ("<|python_start|>[", "]<|python_end|>", ", ", False),
    "tool_code": ("```tool_code\n", "\n```", "\n", True),
    "python": ("```python\n", "\n```", "\n", True),
    "lfm": ("<|tool_call_start|>[", "]<|tool_call_end|>", ", ", False),
    "olmo": ("<function_calls>", "</function_calls>", "\n", False),
    "code": ("<code>\n", "\n</code>", "\n", False),
    "action": ("<action>", "</action>", "\n", False),
    "execute": ("<execute>\n", "\n</execute>", "\n", False),
}


@dataclass(frozen=True, kw_only=True)
class Python(Family):
    """Calls of functions with named literals, in a list, a fence or tags. `scope`: what they are attributes of."""

    family: ClassVar[str] = "python"
    exact: ClassVar[bool] = False
    wrap: Literal["list", "python_start", "tool_code", "python", "lfm", "olmo", "code", "action", "execute"] = "list"
    quote: python_text.Quote = "single"
    scope: Literal["none", "functions", "tools", "default_api"] = "none"
    equals: Literal["tight", "spaced"] = "tight"

    @property
    def notes(self) -> str:
        return "Arguments are Python literals, named; no other expressions."

    def render(self, content: str, calls: Sequence[ToolCall]) -> str:
        opener, end, between, _ = _WRAPS[self.wrap]
        written = between.join(self._written(call) for call in calls)
        return self._frame.join(content, [f"{opener}{written}{end}"] if calls else [])

    def stream(self, tools: Sequence[Json] = ()) -> BlockStream:  # noqa: ARG002 - Python has types of its own
        return BlockStream(self._frame, self._read)

    def render_results(self, results: Sequence[ToolResult]) -> str:
        if self.wrap == "tool_code":
            return "\n".join(f"```tool_output\n{one.content}\n```" for one in results)
        return super().render_results(results)

    @property
    def _frame(self) -> Frame:
        opener, end, _, own_line = _WRAPS[self.wrap]
        if self.wrap == "list":
            return Frame(opener=opener, scanner=lambda: Balanced("[]", "'\"", depth=1), own_line=own_line)
        return Frame(opener=opener, scanner=lambda: UntilMark(end.strip(), "'\""), own_line=own_line)

    def _written(self, call: ToolCall) -> str:
        if not python_text.is_name(call.name):
            raise CannotCarryError(f"tool format {self.id}: tool {call.name!r} is no identifier")
        sign = "=" if self.equals == "tight" else " = "
        arguments = arguments_of(call, self.id)
        try:
            named = [
                f"{key}{sign}{python_text.write(one, self.quote)}" for key, one in arguments.items() if _plain(key)
            ]
            others = {key: one for key, one in arguments.items() if not _plain(key)}
            named += [f"**{python_text.write(others, self.quote)}"] if others else []
        except TooDeepError as error:
            raise CannotCarryError(f"tool format {self.id}: arguments of {call.name!r}: {error}") from None
        return f"{self._scope}{call.name}({', '.join(named)})"

    def _read(self, block: str) -> list[ToolCall]:
        opener, end, _, _ = _WRAPS[self.wrap]
        if not block.endswith(end.strip()):
            return self._not_closed(block)
        reader = python_text.Reader(block[len(opener) : len(block) - len(end.strip())])
        calls: list[ToolCall] = []
        while not reader.ended:
            try:
                name = reader.name()
                reader.needs("(")
            except MalformedError:
                if calls or not self._may_be_text:
                    raise
                return []
            if not name.startswith(self._scope):
                raise MalformedError(f"{name} is not of {self.scope}")
            calls.append(ToolCall(name.removeprefix(self._scope), dump(reader.arguments())))
            reader.takes(",") or reader.takes(";")
        if not calls and not self._may_be_text:
            raise MalformedError("no call")
        return calls

    def _not_closed(self, block: str) -> list[ToolCall]:
        if self._may_be_text and "(" not in block:
            return []
        raise MalformedError("not closed")

    @property
    def _may_be_text(self) -> bool:
        """A bracket at the beginning of a line, or code to be shown, need be no call."""
        return self.wrap in ("list", "python")

    @property
    def _scope(self) -> str:
        return "" if self.scope == "none" else f"{self.scope}."


def _plain(key: str) -> bool:
    return python_text.is_name(key) and "." not in key and not iskeyword(key)
