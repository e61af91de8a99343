"""All formats, by id: every combination of every family's fields."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from forge.formats.base import Family, ToolFormat
from forge.formats.json_calls import Bare, Fence, Hermes, JsonList, MistralList
from forge.formats.name_families import Command, DeepSeek, FunctionTag, Harmony, Kimi, MistralArgs, ReAct
from forge.formats.python_calls import Python
from forge.formats.xml import Dsml, Elements, Glm, Lines, QwenXml, Xml
from forge.types import ForgeError

FAMILIES: tuple[type[Family], ...] = (
    Hermes,
    Bare,
    Fence,
    JsonList,
    MistralList,
    MistralArgs,
    DeepSeek,
    Kimi,
    Harmony,
    FunctionTag,
    ReAct,
    Command,
    Xml,
    QwenXml,
    Glm,
    Elements,
    Dsml,
    Lines,
    Python,
)

#: formats that models were published with, by the models' names
PUBLISHED = {
    "qwen3": "hermes:space=spaced,pad=yes",
    "longcat": "hermes:space=spaced,tag=longcat_tool_call,pad=yes",
    "llama3": "json",
    "llama3-function-tag": "function_tag",
    "llama3.2-pythonic": "python",
    "llama4-pythonic": "python:wrap=python_start",
    "lfm2": "python:wrap=lfm",
    "olmo3": "python:wrap=olmo,quote=double",
    "gemma-tool-code": "python:wrap=tool_code,quote=double",
    "nemotron": "list",
    "jamba": "list:marks=jamba",
    "granite": "list:marks=granite",
    "phi4-mini": "list:marks=phi",
    "command-a": "list:keys=tool_name/parameters,marks=command",
    "mistral-v3": "mistral:gap=yes",
    "mistral-args": "mistral_args",
    "deepseek-v3": "deepseek:version=v3",
    "deepseek-v3.1": "deepseek",
    "deepseek-v3.2": "dsml",
    "deepseek-v4": "dsml:wrap=tool_calls",
    "kimi-k2": "kimi",
    "gpt-oss": "harmony",
    "claude": "xml",
    "minimax-m2": "xml:wrap=minimax:tool_call",
    "qwen3-coder": "qwen",
    "seed-oss": "qwen:wrap=seed:tool_call,layout=tight",
    "glm-4.5": "glm",
    "glm-4.7": "glm:layout=tight",
}


@cache
def _variants(family: type[Family]) -> Mapping[str, ToolFormat]:
    return {one.id: one for one in family.variants()}


@cache
def formats() -> Mapping[str, ToolFormat]:
    """Every format by its id, families in their order."""
    return MappingProxyType({name: one for family in FAMILIES for name, one in _variants(family).items()})


def get(name: str) -> ToolFormat:
    """The format of this id, or that a published model uses. Raises ForgeError, naming near ones."""
    told = PUBLISHED.get(name, name)
    family = next((one for one in FAMILIES if one.family == told.partition(":")[0]), None)
    found = _variants(family).get(told) if family else None
    if found is None:
        known = dict.fromkeys([*PUBLISHED, *(one.family for one in FAMILIES), *formats()])
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"near: {', '.join(near)}; " if near else ""
        raise ForgeError(f"tool format {name!r}: there is none; {hint}`forge formats` lists them")
    return found


def tool_prompting(name: str) -> tuple[bool, ToolFormat]:
    """Whether the model's chat template tells of tools and calls, and the format in which replies are read, which else
    tells of them too: "template" (whose calls are Hermes'), "template:ID", or "ID". Raises ForgeError."""
    if name == "template":
        return True, Hermes()
    by_template = name.startswith("template:")
    return by_template, get(name.removeprefix("template:"))
