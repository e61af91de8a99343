"""Families of a name and one JSON object. What they carry: see forge.formats.named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from forge.formats.base import ToolResult
from forge.formats.json_text import dump
from forge.formats.named import Marks, NamedFamily


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
