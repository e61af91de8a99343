"""Anthropic's Messages request: blocks in, a Request out.

A user's message may hold tool results and text at once; here they are messages of their own, in their order.
`cache_control` and whatever else says nothing to the model is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forge.gateway import conversation, fields
from forge.gateway.errors import invalid
from forge.gateway.fields import required, typed
from forge.gateway.request import Constraint, Request
from forge.types import Json

_ROLES = ("user", "assistant", "system")
#: claude-code begins its system prompt with a line for its vendor's accounts, another one in every conversation; no
#: model is meant to see it
NOTE = "x-anthropic-billing-header:"


def parse_messages_request(data: Json) -> Request:
    tools = _tools(data)
    mode, parallel, forced = _tool_choice(typed(data, "tool_choice", dict) or {}, tools)
    return Request(
        model=typed(data, "model", str) or "",
        messages=_system(data) + _messages(data),
        tools=tools,
        calls_allowed=bool(tools) and mode != "none",
        parallel_calls=parallel,
        constraints=forced + _format(data),
        overlooked=fields.given(data, "top_k"),
        stream=typed(data, "stream", bool) or False,
        stop=fields.stops(data, "stop_sequences"),
        max_tokens=fields.integer(data, "max_tokens", 1),
        temperature=fields.number(data, "temperature", 0.0, 1.0),
        top_p=fields.top_p(data),
    )


def _tools(data: Json) -> list[Json]:
    """Tools with a schema. Those the protocol only names (hosted ones, or versions of its own) are ignored."""
    tools = []
    for at, tool in fields.objects(data, "tools"):
        schema = typed(tool, "input_schema", dict, at)
        if schema is not None or typed(tool, "type", str, at) in (None, "custom"):
            name, description = required(tool, "name", str, at), typed(tool, "description", str, at)
            tools.append(conversation.tool(name, description, schema))
    return tools


def _tool_choice(choice: Json, tools: Sequence[Json]) -> tuple[str, bool, tuple[Constraint, ...]]:
    """(mode, whether several calls may be made, what is forced)."""
    mode = choice.get("type", "auto")
    if mode not in ("auto", "any", "tool", "none"):
        raise invalid("tool_choice.type", f"tool_choice.type must be auto, any, tool or none, not {mode!r}.")
    parallel = typed(choice, "disable_parallel_tool_use", bool, "tool_choice") is not True
    if mode in ("auto", "none"):
        return mode, parallel, ()
    names = (required(choice, "name", str, "tool_choice"),) if mode == "tool" else ()
    known = {tool["function"]["name"] for tool in tools}
    if not known or not set(names) <= known:
        raise invalid("tool_choice", f"tool_choice {mode!r} demands a call of a tool that tools does not hold.")
    return mode, parallel, (Constraint(field="tool_choice", calls=True, tools=names),)


def _format(data: Json) -> tuple[Constraint, ...]:
    """A schema for the reply's text, under either of its two names."""
    config = typed(data, "output_config", dict) or {}
    form = typed(config, "format", dict, "output_config") or typed(data, "output_format", dict) or {}
    schema = typed(form, "schema", dict, "output_config.format")
    return () if schema is None else (Constraint(field="output_config.format", schema=schema),)


def _system(data: Json) -> list[Json]:
    value = data.get("system")
    text = "" if value is None else _text(value, "system", "system")
    if text.startswith(NOTE):
        text = text.partition("\n")[2]
    return [{"role": "system", "content": text}] if text else []


def _messages(data: Json) -> list[Json]:
    messages: list[Json] = []
    for at, message in fields.objects(data, "messages"):
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {role!r}.")
        if role == "assistant":
            messages.append(_assistant(content, f"{at}.content"))
        elif role == "user":
            messages += _user(content, f"{at}.content")
        else:
            messages.append({"role": role, "content": _text(content, role, f"{at}.content")})
    if not messages:
        raise invalid("messages", "messages: at least one message is required.")
    return messages


def _user(content: Any, at: str) -> list[Json]:
    """Tool results, and between them what the user says."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages: list[Json] = []
    said: list[str] = []
    for path, block in _blocks(content, at):
        if block.get("type") != "tool_result":
            said.append(_text_block(block, path))
            continue
        if said:
            messages.append({"role": "user", "content": conversation.joined(said, "user")})
            said = []
        result = block.get("content")
        text = "" if result is None else _text(result, "tool", f"{path}.content")
        messages.append(conversation.tool_result(required(block, "tool_use_id", str, path), text))
    if said or not messages:
        messages.append({"role": "user", "content": conversation.joined(said, "user")})
    return messages


def _assistant(content: Any, at: str) -> Json:
    if isinstance(content, str):
        return conversation.assistant(content)
    said: list[str] = []
    thought: list[str] = []
    calls: list[Json] = []
    for path, block in _blocks(content, at):
        kind = block.get("type")
        if kind == "tool_use":
            given = typed(block, "input", dict, path) or {}
            name = required(block, "name", str, path)
            calls.append(conversation.call(typed(block, "id", str, path), name, conversation.json_text(given)))
        elif kind == "thinking":
            thought.append(required(block, "thinking", str, path))
        elif kind != "redacted_thinking":  # nobody's here: ours is never redacted
            said.append(_text_block(block, path))
    return conversation.assistant("".join(said), "".join(thought), calls)


def _text(content: Any, role: str, at: str) -> str:
    if isinstance(content, str):
        return content
    return conversation.joined([_text_block(block, path) for path, block in _blocks(content, at)], role)


def _blocks(content: Any, at: str) -> list[tuple[str, Json]]:
    if not isinstance(content, list):
        raise invalid(at, f"{at} must be a string or a list of blocks, not {fields.kind(content)}.")
    return [(f"{at}[{i}]", fields.an_object(block, f"{at}[{i}]")) for i, block in enumerate(content)]


def _text_block(block: Json, at: str) -> str:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _READ:
        raise invalid(f"{at}.type", f"{at}.type {kind!r} is not supported: this model reads text only.")
    return _READ[kind](block, at)


def _document(block: Json, at: str) -> str:
    """A document of plain text, with its title above it."""
    source = required(block, "source", dict, at)
    if source.get("type") != "text":
        raise invalid(
            f"{at}.source", f"{at}.source {source.get('type')!r} is not supported: this model reads text only."
        )
    title = typed(block, "title", str, at)
    text: str = required(source, "data", str, f"{at}.source")
    return f"{title}\n{text}" if title else text


_READ: dict[str, Callable[[Json, str], str]] = {
    "text": lambda block, at: str(required(block, "text", str, at)),
    "document": _document,
    "tool_reference": lambda block, at: str(required(block, "tool_name", str, at)),
}
