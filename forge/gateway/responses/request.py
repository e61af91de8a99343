"""The Responses request: items in, a Request out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forge.gateway import fields
from forge.gateway.chat_request import json_constraint, tool_choice
from forge.gateway.errors import invalid
from forge.gateway.fields import required, typed
from forge.gateway.request import Constraint, Request
from forge.gateway.responses.items import History
from forge.gateway.responses.store import ResponseStore
from forge.gateway.responses.tools import Origins, parse_tools
from forge.types import Json

#: each would need a server that keeps more than the responses it gave
_REFUSED = {
    "conversation": "send the conversation's items, or previous_response_id",
    "background": "wait for the response, or stream it",
    "prompt": "send the prompt's text as instructions or input",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(Request):
    """What only this protocol's replies need to know."""

    trajectory: str
    #: the messages without `instructions`, which a later response does not carry over
    history: Sequence[Json]
    store: bool
    origins: Origins
    #: what the response object repeats
    repeated: Json = field(default_factory=dict)


def parse_responses_request(data: Json, trajectory: str, store: ResponseStore) -> ResponsesRequest:
    for key, instead in _REFUSED.items():
        if data.get(key):
            raise invalid(key, f"{key} is not supported: {instead}.", "unsupported_parameter")
    tools, origins = parse_tools(data)
    mode, forced = _tool_choice(data.get("tool_choice"), tools)
    history = _history(data, trajectory, store)
    instructions = typed(data, "instructions", str)
    form = typed(typed(data, "text", dict) or {}, "format", dict, "text") or {}
    return ResponsesRequest(
        model=typed(data, "model", str) or "",
        trajectory=trajectory,
        history=history,
        messages=[{"role": "system", "content": instructions}, *history] if instructions else history,
        tools=tools,
        calls_allowed=bool(tools) and mode != "none",
        parallel_calls=typed(data, "parallel_tool_calls", bool) is not False,
        constraints=forced + json_constraint(form, "text.format"),
        overlooked=fields.given(data, "top_logprobs", "max_tool_calls")
        + (("truncation",) if data.get("truncation") == "auto" else ()),
        stream=typed(data, "stream", bool) or False,
        max_tokens=fields.integer(data, "max_output_tokens", 1),
        temperature=fields.number(data, "temperature", 0.0, 2.0),
        top_p=fields.top_p(data),
        store=typed(data, "store", bool) is not False,
        origins=origins,
        repeated=_repeated(data),
    )


def _tool_choice(choice: Any, tools: Sequence[Json]) -> tuple[str, tuple[Constraint, ...]]:
    """A hosted tool cannot be demanded: the model knows none."""
    kinds = ("function", "custom", "allowed_tools")
    if isinstance(choice, dict) and isinstance(choice.get("type"), str) and choice["type"] not in kinds:
        raise invalid("tool_choice", f"tool_choice {choice['type']!r} is not supported: no hosted tool runs here.")
    return tool_choice(choice, tools)


def _history(data: Json, trajectory: str, store: ResponseStore) -> list[Json]:
    previous = typed(data, "previous_response_id", str)
    history = History(store.messages(trajectory, previous) if previous else ())
    given = data.get("input")
    if isinstance(given, str):
        history.add({"role": "user", "content": given}, "input")
    else:
        for at, item in fields.objects(data, "input"):
            referred = item.get("type") == "item_reference"
            history.add(store.item(trajectory, required(item, "id", str, at)) if referred else item, at)
    messages = history.messages()
    if not messages:
        raise invalid("input", "input must be a string or a list of at least one item.")
    return messages


def _repeated(data: Json) -> Json:
    reasoning = typed(data, "reasoning", dict) or {}
    return {
        "instructions": data.get("instructions"),
        "max_output_tokens": data.get("max_output_tokens"),
        "metadata": typed(data, "metadata", dict) or {},
        "parallel_tool_calls": data.get("parallel_tool_calls") is not False,
        "previous_response_id": data.get("previous_response_id"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "store": data.get("store") is not False,
        "temperature": data.get("temperature"),
        "text": data.get("text") or {"format": {"type": "text"}},
        "tool_choice": data.get("tool_choice") or "auto",
        "tools": data.get("tools") or [],
        "top_p": data.get("top_p"),
        "truncation": "disabled",
    }
