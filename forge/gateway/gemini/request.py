"""Gemini's generateContent request: parts in, a Request out. Field names come in camel case or in snake case."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from typing import Any

from forge.gateway import conversation, fields
from forge.gateway.errors import invalid
from forge.gateway.fields import required, typed
from forge.gateway.request import Constraint, Request
from forge.types import Json

_ROLES = {None: "user", "user": "user", "function": "user", "model": "assistant"}
#: names, not values, may be in snake case; these hold values that are none of ours to rename
_OPAQUE = ("args", "response", "parameters", "parametersJsonSchema", "responseSchema", "responseJsonSchema")


def parse_gemini_request(data: Json, *, stream: bool) -> Request:
    data = _camel(data)
    data = typed(data, "generateContentRequest", dict) or data  # as countTokens wraps it
    config = typed(data, "generationConfig", dict) or {}
    at = "generationConfig"
    tools = _tools(data)
    mode, forced = _tool_choice(data, tools)
    return Request(
        messages=_system(data) + _messages(data),
        tools=tools,
        n=fields.integer(config, "candidateCount", 1, at) or 1,
        calls_allowed=bool(tools) and mode != "NONE",
        constraints=forced + _format(config),
        overlooked=fields.given(config, "topK", "presencePenalty", "frequencyPenalty", "responseLogprobs"),
        stream=stream,
        stop=fields.stops(config, "stopSequences", at),
        max_tokens=fields.integer(config, "maxOutputTokens", 1, at),
        temperature=fields.number(config, "temperature", 0.0, 2.0, at),
        top_p=fields.top_p(config, "topP", at),
        seed=fields.seed(config, "seed", at),
    )


def _camel(value: Any) -> Any:
    if isinstance(value, list):
        return [_camel(one) for one in value]
    if not isinstance(value, dict):
        return value
    named = {re.sub("_([a-z])", lambda found: found[1].upper(), key): one for key, one in value.items()}
    return {key: one if key in _OPAQUE else _camel(one) for key, one in named.items()}


def _tools(data: Json) -> list[Json]:
    """Declared functions; hosted tools (search, code execution) are ignored."""
    tools = []
    for at, group in fields.objects(data, "tools"):
        for path, declared in fields.objects(group, "functionDeclarations", at):
            schema = typed(declared, "parametersJsonSchema", dict, path)
            if schema is None:
                schema = _lower(typed(declared, "parameters", dict, path))
            name, description = required(declared, "name", str, path), typed(declared, "description", str, path)
            tools.append(conversation.tool(name, description, schema))
    return tools


def _lower(schema: Any) -> Any:
    """This protocol writes types in capitals; elsewhere they are JSON Schema's."""
    if isinstance(schema, list):
        return [_lower(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: one.lower() if key == "type" and isinstance(one, str) else _lower(one) for key, one in schema.items()}


def _tool_choice(data: Json, tools: Sequence[Json]) -> tuple[str, tuple[Constraint, ...]]:
    config = typed(data, "toolConfig", dict) or {}
    calling = typed(config, "functionCallingConfig", dict, "toolConfig") or {}
    at = "toolConfig.functionCallingConfig"
    mode = typed(calling, "mode", str, at) or "AUTO"
    names = typed(calling, "allowedFunctionNames", list, at) or []
    if mode != "ANY":
        return mode, ()
    known = [tool["function"]["name"] for tool in tools]
    if not known or not all(name in known for name in names):
        raise invalid(at, f"{at}: mode ANY demands a call of a function that tools does not declare.")
    return mode, (Constraint(field=at, calls=True, tools=tuple(names)),)


def _format(config: Json) -> tuple[Constraint, ...]:
    at = "generationConfig"
    schema = typed(config, "responseJsonSchema", dict, at)
    if schema is None:
        schema = _lower(typed(config, "responseSchema", dict, at))
    if schema is None and config.get("responseMimeType") != "application/json":
        return ()
    return (Constraint(field=f"{at}.responseMimeType", schema=schema),)


def _system(data: Json) -> list[Json]:
    content = typed(data, "systemInstruction", dict) or {}
    texts = [_text(part, at) for at, part in fields.objects(content, "parts", "systemInstruction")]
    return [{"role": "system", "content": conversation.joined(texts, "system")}] if texts else []


def _messages(data: Json) -> list[Json]:
    messages: list[Json] = []
    calls = _CallIds()
    for at, content in fields.objects(data, "contents"):
        role = typed(content, "role", str, at)
        if role not in _ROLES:
            raise invalid(f"{at}.role", f"{at}.role must be user or model, not {role!r}.")
        parts = list(fields.objects(content, "parts", at))
        messages += [_model(parts, calls)] if _ROLES[role] == "assistant" else _user(parts, calls)
    if not messages:
        raise invalid("contents", "contents must be a list of at least one content.")
    return messages


class _CallIds:
    """Calls need no id in this protocol: a result then belongs to the oldest call of its function without one."""

    def __init__(self) -> None:
        self._made = 0
        self._open: dict[str, deque[str]] = {}

    def of_call(self, call: Json, at: str) -> str:
        given = typed(call, "id", str, at)
        if given:
            return str(given)
        self._made += 1
        made = f"call_{self._made}"
        self._open.setdefault(call["name"], deque()).append(made)
        return made

    def of_result(self, result: Json, at: str) -> str | None:
        waiting = self._open.get(result["name"])
        given: str | None = typed(result, "id", str, at)
        return waiting.popleft() if not given and waiting else given


def _model(parts: list[tuple[str, Json]], ids: _CallIds) -> Json:
    said = thought = ""
    calls = []
    for at, part in parts:
        call = typed(part, "functionCall", dict, at)
        if call is not None:
            name = required(call, "name", str, f"{at}.functionCall")
            arguments = conversation.json_text(typed(call, "args", dict, at) or {})
            calls.append(conversation.call(ids.of_call(call, at), name, arguments))
        elif part.get("thought"):
            thought += _text(part, at)
        else:
            said += _text(part, at)
    return conversation.assistant(said, thought, calls)


def _user(parts: list[tuple[str, Json]], ids: _CallIds) -> list[Json]:
    messages: list[Json] = []
    said: list[str] = []
    for at, part in parts:
        result = typed(part, "functionResponse", dict, at)
        if result is None:
            said.append(_text(part, at))
            continue
        required(result, "name", str, f"{at}.functionResponse")
        messages.append(conversation.tool_result(ids.of_result(result, at), _result(result.get("response"))))
    if said or not messages:
        messages.append({"role": "user", "content": conversation.joined(said, "user")})
    return messages


def _result(response: Any) -> str:
    """SDKs wrap a text into an object of one field, because the protocol wants an object."""
    if isinstance(response, dict) and len(response) == 1:
        (only,) = response.values()
        if isinstance(only, str):
            return only
    return conversation.json_text(response)


def _text(part: Json, at: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        kinds = [key for key in part if key not in ("thought", "thoughtSignature")]
        raise invalid(at, f"{at} {json.dumps(kinds)} is not supported: this model reads text only.")
    return text
