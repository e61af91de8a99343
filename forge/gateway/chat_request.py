"""The Chat Completions request: checked by hand, field by field, into a Request.

Unknown fields are ignored, as every client sends some. A known field that asks for what cannot be given is refused,
or overlooked where the reply can say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.gateway import conversation, fields
from forge.gateway.errors import invalid
from forge.gateway.fields import typed
from forge.gateway.request import Constraint, Request
from forge.types import Json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
#: refused by no client's standards: a reply without them is still a reply
_OVERLOOKED = ("frequency_penalty", "presence_penalty", "logit_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Request):
    """What only this protocol's replies need to know."""

    include_usage: bool = False


def parse_chat_request(data: Json) -> ChatRequest:
    if fields.integer(data, "top_logprobs", 0):
        raise invalid("top_logprobs", "Only the sampled token's log probability is known; use top_logprobs 0.")
    tools = _tools(data)
    mode, forced = tool_choice(data.get("tool_choice"), tools)
    options = typed(data, "stream_options", dict) or {}
    limit = fields.integer(data, "max_completion_tokens", 1)
    return ChatRequest(
        model=typed(data, "model", str) or "",
        messages=_messages(data),
        tools=tools,
        n=fields.integer(data, "n", 1) or 1,
        calls_allowed=bool(tools) and mode != "none",
        parallel_calls=typed(data, "parallel_tool_calls", bool) is not False,
        constraints=forced + json_constraint(typed(data, "response_format", dict) or {}, "response_format"),
        overlooked=fields.given(data, *_OVERLOOKED),
        stream=typed(data, "stream", bool) or False,
        include_usage=bool(options.get("include_usage")),
        logprobs=typed(data, "logprobs", bool) or False,
        stop=fields.stops(data, "stop"),
        max_tokens=fields.integer(data, "max_tokens", 1) if limit is None else limit,
        temperature=fields.number(data, "temperature", 0.0, 2.0),
        top_p=fields.top_p(data),
        seed=fields.seed(data),
    )


def tool_choice(choice: Any, tools: Sequence[Json]) -> tuple[str, tuple[Constraint, ...]]:
    """(mode, what is forced) of OpenAI's tool_choice, in the form of either of its protocols."""
    names: tuple[str, ...] = ()
    mode = "auto" if choice is None else choice
    if isinstance(mode, dict):
        names = tuple(_chosen(mode))
        allowed: Json = mode["allowed_tools"] if isinstance(mode.get("allowed_tools"), dict) else mode
        mode = (allowed.get("mode") or "auto") if mode.get("type") == "allowed_tools" else "required"
    if mode not in ("none", "auto", "required"):
        raise invalid("tool_choice", "tool_choice must be 'none', 'auto', 'required', or an object naming a tool.")
    if mode != "required":
        return mode, ()
    known = {tool["function"]["name"] for tool in tools}
    unknown = sorted(set(names) - known)
    if unknown or not known:
        missing = f"the tool {unknown[0]!r}" if unknown else "tools"
        raise invalid("tool_choice", f"tool_choice demands a call, but the request does not specify {missing}.")
    return mode, (Constraint(field="tool_choice", calls=True, tools=names),)


def _chosen(choice: Json) -> list[str]:
    """Names in a tool_choice object: of a function, a custom tool, or a list of allowed ones."""
    listed = choice.get("allowed_tools", choice)
    entries = listed.get("tools") if isinstance(listed, dict) and choice.get("type") == "allowed_tools" else [choice]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise invalid("tool_choice", "tool_choice.tools must be a list of objects.")
    inner = [entry.get("function") or entry.get("custom") or entry for entry in entries]
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in inner]
    if not all(isinstance(name, str) for name in names):
        raise invalid("tool_choice", "tool_choice must be a string, or an object that names a tool.")
    return [str(name) for name in names]


def json_constraint(form: Json, field: str) -> tuple[Constraint, ...]:
    """What a response format, in the form of either of OpenAI's protocols, demands of the content."""
    kind = form.get("type", "text")
    if kind == "text":
        return ()
    if kind == "json_object":
        return (Constraint(field=field),)
    if kind != "json_schema":
        raise invalid(field, f"{field}.type must be 'text', 'json_object' or 'json_schema', not {kind!r}.")
    described = form.get("json_schema", form)
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise invalid(field, f"{field} of type 'json_schema' must carry a schema, which is an object.")
    return (Constraint(field=field, schema=schema),)


def _messages(data: Json) -> list[Json]:
    messages = [_message(message, at) for at, message in fields.objects(data, "messages")]
    if not messages:
        raise invalid("messages", "messages must be a list of at least one message.")
    return messages


def _message(message: Json, at: str) -> Json:
    """A message in the one form codecs know: known role, content a string, calls checked."""
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {role!r}.")
    content = message.get("content")
    out: Json = {
        "role": _ROLES[role],
        "content": content if isinstance(content, str) else _content(content, role, at),
    }
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            out[key] = typed(message, key, str, at)
    if role == "assistant":
        # Two names are in use for the same thing; what clients echo under either was reasoning of ours.
        thought = typed(message, "reasoning_content", str, at) or typed(message, "reasoning", str, at)
        calls = [_call(call, path) for path, call in fields.objects(message, "tool_calls", at)]
        return out | conversation.assistant(out["content"], thought or "", calls)
    return out


def _content(content: Any, role: str, at: str) -> str:
    """Null is nothing said (assistants only)."""
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        message = f"{at}.content must be a string or a list of text parts, not {fields.kind(content)}."
        raise invalid(f"{at}.content", message)
    return conversation.joined([_part(part, f"{at}.content[{i}]") for i, part in enumerate(content)], role)


def _part(part: Any, at: str) -> str:
    kind = fields.an_object(part, at).get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise invalid(f"{at}.type", f"{at}.type {kind!r} is not supported: this model reads text only.")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise invalid(at, f"{at} must carry a string {_TEXT_PARTS[kind]!r}.")
    return text


def _call(call: Json, at: str) -> Json:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(at, f"{at} must be an object whose function has a name.")
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        raise invalid(f"{at}.function.arguments", f"{at}.function.arguments must be a JSON string.")
    return conversation.call(typed(call, "id", str, at), function["name"], arguments)


def _tools(data: Json) -> list[Json]:
    tools = [tool for _, tool in fields.objects(data, "tools")]
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            at = f"tools[{index}]"
            raise invalid(at, f"{at} must be {{'type': 'function', 'function': {{'name': ...}}}}.")
    return tools
