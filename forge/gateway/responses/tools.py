"""Tools of the Responses API: functions, functions in namespaces, free-form ones; flat functions to the model.

Hosted tools (web search and the like) are ignored: nothing here could run them, so the model is not told of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forge.gateway import conversation, fields
from forge.gateway.fields import required, typed
from forge.types import Json


@dataclass(frozen=True, slots=True)
class Origin:
    """What a client calls a tool that the model knows by a flat name. `custom`: its input is text, not an object."""

    name: str
    namespace: str | None
    custom: bool


Origins = Mapping[str, Origin]


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def parse_tools(data: Json) -> tuple[list[Json], Origins]:
    """(tools in normal form, where each flat name comes from)."""
    tools: list[Json] = []
    origins: dict[str, Origin] = {}
    for at, tool, namespace in _listed(data):
        kind = typed(tool, "type", str, at)
        if kind not in ("function", "custom"):
            continue
        name: str = required(tool, "name", str, at)
        flat = flat_name(name, namespace)
        origins[flat] = Origin(name, namespace, kind == "custom")
        parameters = _TEXT_INPUT if kind == "custom" else typed(tool, "parameters", dict, at)
        tools.append(conversation.tool(flat, typed(tool, "description", str, at), parameters))
    return tools, origins


def _listed(data: Json) -> Iterator[tuple[str, Json, str | None]]:
    """(path, tool, its namespace) of every tool, in order."""
    for at, tool in fields.objects(data, "tools"):
        if tool.get("type") == "namespace":
            namespace: str = required(tool, "name", str, at)
            for path, inner in fields.objects(tool, "tools", at):
                yield path, inner, namespace
        else:
            yield at, tool, None


_TEXT_INPUT: Json = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


def text_input(arguments: str) -> str:
    """The input of a custom tool's call; all of the arguments where the model wrote them otherwise."""
    value = json.loads(arguments).get("input")
    return value if isinstance(value, str) else arguments
