"""The one form every protocol's history is put into before anything else looks at it: OpenAI's chat messages, with
plain string contents. Codecs render it; whoever compares a history with what was served compares this form.

    {"role": "system" | "user", "content": str, "name"?: str}
    {"role": "assistant", "content": str, "reasoning_content"?: str, "tool_calls"?: [call, ...], "name"?: str}
    {"role": "tool", "content": str, "tool_call_id"?: str, "name"?: str}

A call is `{"id": str | None, "type": "function", "function": {"name": str, "arguments": str}}`; its arguments are the
JSON text the client sent, where the protocol carries text, else that object written by `json_text`. A tool is
`{"type": "function", "function": {"name", "description"?, "parameters"?}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from forge.gateway.reading import ReplyPiece
from forge.gateway.reasoning import Reasoning
from forge.gateway.tool_format import ToolCall
from forge.types import Json


def assistant(content: str, reasoning: str = "", calls: Sequence[Json] = ()) -> Json:
    message: Json = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(call_id: str | None, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str | None, content: str) -> Json:
    message: Json = {"role": "tool", "content": content}
    return message if call_id is None else message | {"tool_call_id": call_id}


def tool(name: str, description: str | None, parameters: Json | None) -> Json:
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def joined(texts: Iterable[str], role: str) -> str:
    """One content of several parts. What an assistant said in parts it said in one go; others' parts are paragraphs."""
    return ("" if role == "assistant" else "\n").join(texts)


def json_text(value: Any) -> str:
    """The text of an object from a protocol that carries no text."""
    return json.dumps(value, ensure_ascii=False)


def spoken(pieces: Iterable[ReplyPiece], call_ids: Iterable[str]) -> Json:
    """A reply as the assistant message its client echoes. `call_ids` are its calls', in their order."""
    ids, calls = iter(call_ids), []
    content: list[str] = []
    reasoning: list[str] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            calls.append(call(next(ids), piece.name, piece.arguments))
        elif isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        else:
            content.append(piece)
    return assistant("".join(content), "".join(reasoning), calls)
