"""The Chat Completions request: checked by hand, field by field, into one small object.

Unknown fields are ignored, as every client sends some. A known field that asks for what cannot be given (several
choices, a forced tool, a forced format) is refused: silence would be a broken promise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.gateway.errors import invalid
from forge.types import Json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request as the gateway works on it. None means the client left it to the server."""

    messages: Sequence[Json]
    tools: Sequence[Json]
    #: whether tool tags in the reply are calls; with tool_choice "none" they are text
    calls_allowed: bool
    stream: bool
    include_usage: bool
    logprobs: bool
    stop: tuple[str, ...]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None


def parse_chat_request(body: bytes) -> ChatRequest:
    """Raises ApiError (400) naming the field at fault."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(None, "We could not parse the JSON body of your request.", "invalid_json") from error
    if not isinstance(data, dict):
        raise invalid(None, f"The body must be a JSON object, not {_kind(data)}.", "invalid_json")
    _refuse_unsupported(data)
    tools = _tools(data)
    options = _typed(data, "stream_options", dict) or {}
    completion_limit = _integer(data, "max_completion_tokens", 1)
    _typed(data, "model", str)
    return ChatRequest(
        messages=_messages(data),
        tools=tools,
        calls_allowed=bool(tools) and data.get("tool_choice") != "none",
        stream=_typed(data, "stream", bool) or False,
        include_usage=bool(options.get("include_usage")),
        logprobs=_typed(data, "logprobs", bool) or False,
        stop=_stop(data),
        max_tokens=_integer(data, "max_tokens", 1) if completion_limit is None else completion_limit,
        temperature=_number(data, "temperature", 0.0, 2.0),
        top_p=_top_p(data),
        seed=_seed(data),
    )


def _refuse_unsupported(data: Json) -> None:
    n = _integer(data, "n", 1)
    if n not in (None, 1):
        raise invalid("n", f"n = {n} is not supported: send {n} requests, each is sampled anew.")
    choice = data.get("tool_choice")
    if choice not in (None, "none", "auto"):
        shown = choice if isinstance(choice, str) else "a named tool"
        message = f"tool_choice {shown!r} is not supported: a call cannot be enforced yet. Use 'auto' or 'none'."
        raise invalid("tool_choice", message, "unsupported_value")
    if _integer(data, "top_logprobs", 0):
        raise invalid("top_logprobs", "Only the sampled token's log probability is known; use top_logprobs 0.")
    form = _typed(data, "response_format", dict) or {}
    if form.get("type", "text") != "text":
        raise invalid("response_format", "Only response_format {'type': 'text'} can be kept.", "unsupported_value")


def _messages(data: Json) -> list[Json]:
    messages = _typed(data, "messages", list)
    if not messages:
        raise invalid("messages", "messages must be a list of at least one message.")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, at: str) -> Json:
    """A message in the one form codecs know: known role, content a string, calls checked."""
    if not isinstance(message, dict):
        raise invalid(at, f"{at} must be an object, not {_kind(message)}.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {role!r}.")
    content = message.get("content")
    if not isinstance(content, str):
        content = _content(content, role, at)
    out: Json = {"role": _ROLES[role], "content": content}
    for key in _PASSED_ON:
        if message.get(key) is not None:
            out[key] = _typed(message, key, str, at)
    calls = _typed(message, "tool_calls", list, at)
    if calls:
        out["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def _content(content: Any, role: str, at: str) -> str:
    """Null is nothing said (assistants only); text parts are joined by newlines."""
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list):
        message = f"{at}.content must be a string or a list of text parts, not {_kind(content)}."
        raise invalid(f"{at}.content", message)
    return "\n".join(_part(part, f"{at}.content[{index}]") for index, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if not isinstance(part, dict):
        raise invalid(at, f"{at} must be an object, not {_kind(part)}.")
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise invalid(f"{at}.type", f"{at}.type {kind!r} is not supported: this model reads text only.")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise invalid(at, f"{at} must carry a string {_TEXT_PARTS[kind]!r}.")
    return text


def _call(call: Any, at: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(at, f"{at} must be an object whose function has a name.")
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        raise invalid(f"{at}.function.arguments", f"{at}.function.arguments must be a JSON string.")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _tools(data: Json) -> list[Json]:
    tools = _typed(data, "tools", list) or []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            at = f"tools[{index}]"
            raise invalid(at, f"{at} must be {{'type': 'function', 'function': {{'name': ...}}}}.")
    return tools


def _stop(data: Json) -> tuple[str, ...]:
    stop = data.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops) or len(stops) > 16:
        raise invalid("stop", "stop must be a string or a list of at most 16 strings.")
    return tuple(s for s in stops if s)


def _top_p(data: Json) -> float | None:
    top_p = _number(data, "top_p", 0.0, 1.0)
    # OpenAI allows 0, meaning the likeliest token alone; engines want a positive share.
    return top_p if top_p is None else max(top_p, 1e-6)


def _seed(data: Json) -> int | None:
    seed = _typed(data, "seed", int)
    # Engines take natural numbers; clients send any 64-bit integer.
    return None if seed is None else seed & (2**63 - 1)


def _integer(data: Json, key: str, least: int) -> int | None:
    value: int | None = _typed(data, key, int)
    if value is not None and value < least:
        raise invalid(key, f"{key} must be at least {least}, not {value}.")
    return value


def _number(data: Json, key: str, low: float, high: float) -> float | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise invalid(key, f"{key} must be a number from {low:g} to {high:g}.")
    return float(value)


def _typed(data: Json, key: str, kind: type, at: str = "") -> Any:
    """The field, None if absent or null. A bool is no int, though Python thinks so."""
    value = data.get(key)
    if value is None or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
        return value
    name = f"{at}.{key}" if at else key
    raise invalid(name, f"{name} must be {_NAMES[kind]}, not {_kind(value)}.")


_NAMES: dict[type, str] = {str: "a string", int: "an integer", bool: "a boolean", list: "a list", dict: "an object"}


def _kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), "a number")
