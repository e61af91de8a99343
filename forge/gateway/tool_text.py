"""A conversation with tools for a template that knows none: tools in the system message, calls in the text, results as
user turns, in any of forge.formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from forge.formats import CannotCarryError, ToolCall, ToolFormat, ToolResult
from forge.gateway.chat_template import ChatError
from forge.types import Json


def text_messages(messages: Sequence[Json], tools: Sequence[Json], tool_format: ToolFormat) -> list[Json]:
    """Raises ChatError for a call that the format cannot carry."""
    names = dict(_called(messages))
    out: list[Json] = []
    for is_result, run in groupby(messages, lambda message: bool(message["role"] == "tool")):
        if is_result:
            results = [ToolResult(_name(message, names), message["content"]) for message in run]
            out.append({"role": "user", "content": tool_format.render_results(results)})
        else:
            out += [_said(message, tool_format) for message in run]
    return _with_tools(out, tool_format.describe(tools)) if tools else out


def _called(messages: Sequence[Json]) -> Iterator[tuple[str | None, str]]:
    """Ids of calls, and the names of their tools."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield call["id"], call["function"]["name"]


def _name(result: Json, names: dict[str | None, str]) -> str:
    return str(result.get("name") or names.get(result.get("tool_call_id"), ""))


def _said(message: Json, tool_format: ToolFormat) -> Json:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [ToolCall(function["name"], function["arguments"] or "{}") for function in functions]
    try:
        said = {"role": message["role"], "content": tool_format.render(message["content"], calls)}
    except CannotCarryError as error:
        raise ChatError(str(error)) from error
    thought = message.get("reasoning_content")
    return said | {"reasoning_content": thought} if thought else said


def _with_tools(messages: list[Json], told: str) -> list[Json]:
    if messages and messages[0]["role"] == "system":
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{told}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]
