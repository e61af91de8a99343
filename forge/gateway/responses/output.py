"""A reply as output items of the Responses API, and as the events that tell of them.

Items close when the next begins, the last one when the reply is complete: an agent that acts on a closed call acts
on a reply that has been recorded.
"""

from __future__ import annotations

from collections.abc import Iterator

from forge.gateway.generation import Generation
from forge.gateway.reading import ReplyPiece
from forge.gateway.reasoning import Reasoning
from forge.gateway.responses.items import seal
from forge.gateway.responses.tools import Origin, Origins, text_input
from forge.gateway.tool_format import ToolCall
from forge.types import Json

#: (type without "response.", fields)
Event = tuple[str, Json]


class OutputItems:
    """Takes pieces in order; `items` is the output so far. The events tell the same in full."""

    def __init__(self, generation: Generation, origins: Origins) -> None:
        self.items: list[Json] = []
        self._generation = generation
        self._origins = origins
        self._open = ""  # type of the open item
        self._text = ""  # of the open item, so far
        self._calls = 0

    def add(self, piece: ReplyPiece) -> Iterator[Event]:
        if isinstance(piece, ToolCall):
            yield from self._call(piece)
            return
        kind, text = ("reasoning", piece.text) if isinstance(piece, Reasoning) else ("message", piece)
        if self._open != kind:
            yield from self._begin_text(kind)
        self._text += text
        delta = {**self._place(), "delta": text}
        if kind == "message":
            yield "output_text.delta", delta | {"logprobs": []}
        else:
            yield "reasoning_text.delta", delta

    def end(self) -> Iterator[Event]:
        """The reply is complete. One that says nothing is an empty message."""
        if not self.items:
            yield from self._begin_text("message")
        yield from self._close("incomplete" if self._generation.finish == "length" else "completed")

    def _begin_text(self, kind: str) -> Iterator[Event]:
        message = kind == "message"
        head: Json = {"role": "assistant"} if message else {"summary": [], "encrypted_content": None}
        yield from self._begin(kind, "msg" if message else "rs", {**head, "content": []})
        yield "content_part.added", {**self._place(), "part": _part(kind, "")}

    def _call(self, piece: ToolCall) -> Iterator[Event]:
        origin = self._origins.get(piece.name, Origin(piece.name, None, False))
        call_id = self._generation.call_id(self._calls)
        self._calls += 1
        head: Json = {"call_id": call_id, "name": origin.name}
        if origin.namespace:
            head["namespace"] = origin.namespace
        if origin.custom:
            yield from self._begin("custom_tool_call", "ctc", {**head, "input": ""})
            self._text = text_input(piece.arguments)
        else:
            yield from self._begin("function_call", "fc", {**head, "arguments": ""})
            self._text = piece.arguments
        yield f"{_CALL_EVENTS[self._open]}.delta", {**self._item(), "delta": self._text}

    def _begin(self, kind: str, prefix: str, rest: Json) -> Iterator[Event]:
        yield from self._close("completed")
        item_id = f"{prefix}_{self._generation.id}{len(self.items):02x}"
        item = {"id": item_id, "type": kind, "status": "in_progress", **rest}
        self.items.append(item)
        self._open, self._text = kind, ""
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": item}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        item = self.items[-1]
        if self._open in _CALL_EVENTS:
            key = "input" if self._open == "custom_tool_call" else "arguments"
            item[key] = self._text
            yield f"{_CALL_EVENTS[self._open]}.done", {**self._item(), "name": item["name"], key: self._text}
        else:
            part = _part(self._open, self._text)
            done = {**self._place(), "text": self._text}
            if self._open == "message":
                yield "output_text.done", done | {"logprobs": []}
            else:
                yield "reasoning_text.done", done
                item["encrypted_content"] = seal(self._text)
            yield "content_part.done", {**self._place(), "part": part}
            item["content"] = [part]
        item["status"] = status
        self._open = ""
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _item(self) -> Json:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _place(self) -> Json:
        return {**self._item(), "content_index": 0}


def _part(kind: str, text: str) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_CALL_EVENTS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}
