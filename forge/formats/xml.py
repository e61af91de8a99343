"""Families of marked-up arguments. What they carry: see forge.formats.params."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from forge.formats.base import ToolResult
from forge.formats.params import ParamFamily, ParamMarks


@dataclass(frozen=True, kw_only=True)
class Xml(ParamFamily):
    """Names in attributes: Claude's function_calls, MiniMax M2, and their kin."""

    family: ClassVar[str] = "xml"
    wrap: Literal["function_calls", "minimax:tool_call", "tool_calls", "actions"] = "function_calls"
    tag: Literal["invoke", "call", "tool", "action"] = "invoke"
    args: Literal["parameter", "param", "argument", "arg"] = "parameter"
    quote: Literal["double", "single"] = "double"
    layout: Literal["lines", "tight"] = "lines"

    @property
    def marks(self) -> ParamMarks:
        quote = '"' if self.quote == "double" else "'"
        return ParamMarks(
            section=(f"<{self.wrap}>", f"</{self.wrap}>"),
            call=(f"<{self.tag} name={quote}", f"{quote}>", f"</{self.tag}>"),
            param=(f"<{self.args} name={quote}", (f"{quote}>",), f"</{self.args}>"),
            gap="\n" if self.layout == "lines" else "",
        )

    def render_results(self, results: Sequence[ToolResult]) -> str:
        if self.wrap == "minimax:tool_call":
            return "\n".join(f"<response>{one.content}</response>" for one in results)
        told = (f"<result>\n<name>{one.name}</name>\n<output>{one.content}</output>\n</result>" for one in results)
        return "\n".join(["<function_results>", *told, "</function_results>"])


@dataclass(frozen=True, kw_only=True)
class QwenXml(ParamFamily):
    """Names behind an equals sign: Qwen3-Coder, Seed-OSS."""

    family: ClassVar[str] = "qwen"
    wrap: Literal["tool_call", "seed:tool_call", "function_call", "tool_use"] = "tool_call"
    tag: Literal["function", "tool", "call"] = "function"
    args: Literal["parameter", "arg", "param"] = "parameter"
    layout: Literal["lines", "tight"] = "lines"
    grouped: bool = False

    @property
    def marks(self) -> ParamMarks:
        edge = "\n" if self.layout == "lines" else ""
        return ParamMarks(
            section=(f"<{self.wrap}>", f"</{self.wrap}>"),
            grouped=self.grouped,
            call=(f"<{self.tag}=", ">", f"</{self.tag}>"),
            param=(f"<{self.args}=", (">",), f"</{self.args}>"),
            gap=edge,
            pad=edge,
        )


@dataclass(frozen=True, kw_only=True)
class Glm(ParamFamily):
    """Keys and values side by side in elements of their own, the tool's name before them: GLM 4.5 to 4.7."""

    family: ClassVar[str] = "glm"
    wrap: Literal["tool_call", "call", "function_call", "tool"] = "tool_call"
    pair: Literal["arg_key/arg_value", "key/value", "name/value", "k/v"] = "arg_key/arg_value"
    layout: Literal["lines", "tight"] = "lines"

    @property
    def marks(self) -> ParamMarks:
        key, value = self.pair.split("/")
        return ParamMarks(
            section=(f"<{self.wrap}>", f"</{self.wrap}>"),
            grouped=False,
            call=("", "", ""),
            param=(f"<{key}>", (f"</{key}>", f"<{value}>"), f"</{value}>"),
            gap="\n" if self.layout == "lines" else "",
        )


@dataclass(frozen=True, kw_only=True)
class Elements(ParamFamily):
    """Names as elements: a tool is an element, its arguments are elements inside; Cline, Roo."""

    family: ClassVar[str] = "elements"
    wrap: Literal["tool_use", "use_tool", "tool_call", "invoke_tool", "run_tool"] = "tool_use"
    layout: Literal["lines", "tight", "padded"] = "lines"
    grouped: bool = True

    @property
    def marks(self) -> ParamMarks:
        return ParamMarks(
            section=(f"<{self.wrap}>", f"</{self.wrap}>"),
            grouped=self.grouped,
            call=("<", ">", "</{}>"),
            param=("<", (">",), "</{}>"),
            gap="" if self.layout == "tight" else "\n",
            pad="\n" if self.layout == "padded" else "",
        )


@dataclass(frozen=True, kw_only=True)
class Dsml(ParamFamily):
    """DeepSeek V3.2 and V4: elements behind a special token, every argument says whether it is a string."""

    family: ClassVar[str] = "dsml"
    values: Literal["text"] = "text"
    wrap: Literal["function_calls", "tool_calls"] = "function_calls"
    token: Literal["wide", "ascii", "namespace"] = "wide"
    flag: Literal["string", "text", "is_string"] = "string"
    layout: Literal["lines", "tight"] = "lines"

    @property
    def marks(self) -> ParamMarks:
        token = {"wide": "｜DSML｜", "ascii": "|DSML|", "namespace": "t:"}[self.token]
        return ParamMarks(
            section=(f"<{token}{self.wrap}>", f"</{token}{self.wrap}>"),
            call=(f'<{token}invoke name="', '">', f"</{token}invoke>"),
            param=(f'<{token}parameter name="', (f'" {self.flag}="true">',), f"</{token}parameter>"),
            json_between=(f'" {self.flag}="false">',),
            gap="\n" if self.layout == "lines" else "",
        )


_LINE_WORDS = {
    "at": ("@call", "@end"),
    "angles": ("<<<", ">>>"),
    "section": ("[tool]", "[end]"),
    "colons": ("::tool", "::"),
    "percent": ("%%", "%%"),
    "bang": ("!do", "!done"),
}


@dataclass(frozen=True, kw_only=True)
class Lines(ParamFamily):
    """An argument a line, between a line that names the tool and one that ends the call."""

    family: ClassVar[str] = "lines"
    values: Literal["text", "json"] = "text"
    words: Literal["at", "angles", "section", "colons", "percent", "bang"] = "at"
    sign: Literal["colon", "equals", "arrow", "tight", "walrus"] = "colon"
    bullet: Literal["none", "dash", "star", "plus"] = "none"

    @property
    def marks(self) -> ParamMarks:
        begin, end = _LINE_WORDS[self.words]
        bullet = {"none": "", "dash": "- ", "star": "* ", "plus": "+ "}[self.bullet]
        sign = {"colon": ": ", "equals": " = ", "arrow": " -> ", "tight": "=", "walrus": " := "}[self.sign]
        return ParamMarks(
            call=(f"{begin} ", "\n", end),
            param=(bullet, (sign,), "\n"),
            gap="",
            own_line=True,
        )
