"""Items of the Responses API, into and out of the normal form of a conversation.

A turn of the assistant is several items there and one message here. Reasoning begins a turn, and so does a message
right after a message; a call, and a message after a call, go on with the turn they follow.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable
from typing import Any

from forge.gateway import conversation, fields
from forge.gateway.errors import invalid
from forge.gateway.fields import required, typed
from forge.gateway.responses.tools import flat_name
from forge.types import Json

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
#: marks sealed reasoning as ours
_SEAL = "forge:"


class History:
    """Messages being built from items, on top of those of earlier responses."""

    def __init__(self, messages: Iterable[Json] = ()) -> None:
        self._messages = list(messages)
        self._reasoning = self._content = ""
        self._calls: list[Json] = []
        #: what the open turn ends with: "reasoning", "message", "call", or "" where none is open
        self._last = ""

    def messages(self) -> list[Json]:
        """All of them; the open turn is over."""
        if self._last:
            self._messages.append(conversation.assistant(self._content, self._reasoning, self._calls))
            self._reasoning = self._content = self._last = ""
            self._calls = []
        return self._messages

    def add(self, item: Json, at: str) -> None:
        """Raises ApiError for an item that cannot be rendered."""
        kind = typed(item, "type", str, at) or "message"
        if kind == "message":
            self._message(item, at)
        elif kind == "reasoning":
            self._think(item, at)
        elif kind == "function_call":
            name = flat_name(required(item, "name", str, at), typed(item, "namespace", str, at))
            self._call(item, name, typed(item, "arguments", str, at) or "", at)
        elif kind == "custom_tool_call":
            given = {"input": typed(item, "input", str, at) or ""}
            name = flat_name(required(item, "name", str, at), typed(item, "namespace", str, at))
            self._call(item, name, conversation.json_text(given), at)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = required(item, "call_id", str, at)
            output = text_of(item.get("output"), "tool", f"{at}.output")
            self.messages().append(conversation.tool_result(call_id, output))
        else:
            raise invalid(f"{at}.type", f"{at}.type {kind!r} is not supported: this model was shown no such item.")

    def _message(self, item: Json, at: str) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(_ROLES)}, not {role!r}.")
        text = text_of(item.get("content"), role, f"{at}.content")
        if role != "assistant":
            self.messages().append({"role": _ROLES[role], "content": text})
            return
        if self._last == "message":
            self.messages()
        self._content += text
        self._last = "message"

    def _think(self, item: Json, at: str) -> None:
        if self._last not in ("", "reasoning"):
            self.messages()
        self._reasoning += reasoning_of(item, at)
        self._last = "reasoning"

    def _call(self, item: Json, name: str, arguments: str, at: str) -> None:
        self._calls.append(conversation.call(required(item, "call_id", str, at), name, arguments))
        self._last = "call"


def text_of(content: Any, role: str, at: str) -> str:
    """Contents are a string or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(at, f"{at} must be a string or a list of text parts, not {fields.kind(content)}.")
    return conversation.joined([_part(part, f"{at}[{index}]") for index, part in enumerate(content)], role)


def _part(part: Any, at: str) -> str:
    kind = fields.an_object(part, at).get("type")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise invalid(f"{at}.type", f"{at}.type {kind!r} is not supported: this model reads text only.")
    text: str = required(part, _TEXT_PARTS[kind], str, at)
    return text


def reasoning_of(item: Json, at: str) -> str:
    """What a reasoning item holds: sealed by us, or in the open as content or as a summary."""
    sealed = typed(item, "encrypted_content", str, at) or ""
    if sealed.startswith(_SEAL):
        return unseal(sealed, f"{at}.encrypted_content")
    for key in ("content", "summary"):
        texts = [required(part, "text", str, path) for path, part in fields.objects(item, key, at)]
        if texts:
            return "\n".join(texts)
    return ""


def seal(reasoning: str) -> str:
    """Some clients echo no reasoning but this. It is no secret, only opaque."""
    return _SEAL + base64.b64encode(reasoning.encode(errors="surrogatepass")).decode()


def unseal(sealed: str, at: str) -> str:
    try:
        return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode(errors="surrogatepass")
    except (binascii.Error, ValueError) as error:
        raise invalid(
            at, f"{at} could not be verified: it is not what was sent.", "invalid_encrypted_content"
        ) from error
