"""The Hermes format, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which chat templates speak where no
other of forge.formats is named.

Parsing never raises: what is not a well-formed call comes back as the text it is, and is counted as malformed.
A call is handed out only when its closing tag has been read and its JSON is sound. Agents do wild things with
broken arguments (one repairs and executes them), so a streamed call is as trustworthy as one in a whole reply.
"""

from __future__ import annotations

from collections.abc import Sequence

from forge.formats.base import Piece, ToolCall, ToolStream
from forge.formats.json_calls import Hermes
from forge.formats.stream import BlockStream

__all__ = ["CLOSE", "OPEN", "HermesStream", "Piece", "ToolCall", "ToolStream", "parse", "render"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
HERMES = Hermes()


class HermesStream(BlockStream):
    def __init__(self) -> None:
        super().__init__(HERMES.frame, HERMES.read)


def render(content: str, calls: Sequence[ToolCall]) -> str:
    """The text of an assistant turn: content, then one tag per line. `parse` gives both back."""
    return HERMES.render(content, calls)


def parse(text: str) -> tuple[str, list[ToolCall], int]:
    """(content, calls, malformed) of a whole reply."""
    stream = HermesStream()
    pieces = [*stream.feed(text), *stream.close()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ToolCall)], stream.malformed
