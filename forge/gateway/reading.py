"""Sampled ids to what a client may see, as they arrive: ids -> text -> stop strings -> reasoning, content, tool calls.

The whole-reply path is the same code fed once, so a streamed and a whole reply never differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.gateway.reasoning import Reasoning, ReasoningStream
from forge.gateway.tool_format import Piece, ToolCall, ToolStream

Decode = Callable[[Sequence[int]], str]
ReplyPiece = Piece | Reasoning


class TextStream:
    """Incremental decoding: the concatenation of what comes out is the decoding of all ids.

    A character may be spread over several tokens, and a token's text may depend on the one before it. So the text
    is the difference between decoding a short window with and without the new ids, held back while it ends in
    the mark of a broken character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []
        self._fresh: list[int] = []

    def feed(self, ids: Sequence[int]) -> str:
        self._fresh += ids
        text = self._text()
        return "" if text.endswith("\ufffd") else self._give(text)

    def close(self) -> str:
        return self._give(self._text())

    def _text(self) -> str:
        known = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._fresh)[len(known) :]

    def _give(self, text: str) -> str:
        if text:
            self._context, self._fresh = self._fresh, []
        return text


class StopScanner:
    """Cuts text at the first stop string, which is not part of the reply; holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        #: the stop string that ended the reply
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        if not self._stops or self.hit:
            return "" if self.hit else text
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            cut, self.hit = min(found)
            self._held = ""
            return text[:cut]
        keep = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def close(self) -> str:
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class ReplyReader:
    """One reply being read.

    `tools` is None where no call may be made: then tags are just text. So are thinking tags without `reasoning`.
    With `one_call` the reply ends with its first call.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str] = (),
        tools: ToolStream | None = None,
        reasoning: ReasoningStream | None = None,
        *,
        one_call: bool = False,
    ) -> None:
        self._text = TextStream(decode)
        self._stops = StopScanner(stops)
        self._tools = tools
        self._reasoning = reasoning
        self._one_call = one_call
        self._called = False
        #: whether what ends the reply may lie between two ids of one delta
        self.may_stop = bool(stops) or one_call
        #: whether any of it was reasoning
        self.reasoned = False

    @property
    def stopped(self) -> bool:
        """The reply was ended by what was read: nothing after it belongs to it."""
        return self._called or self._stops.hit is not None

    @property
    def stop_string(self) -> str | None:
        return self._stops.hit

    @property
    def malformed(self) -> int:
        return self._tools.malformed if self._tools else 0

    def feed(self, ids: Sequence[int]) -> list[ReplyPiece]:
        return self._pieces(self._stops.feed(self._text.feed(ids)))

    def close(self) -> list[ReplyPiece]:
        pieces = self._pieces(self._stops.feed(self._text.close()) + self._stops.close())
        if self._reasoning and not self._called:
            pieces += self._sorted(self._reasoning.close())
        if self._tools and not self._called:
            pieces += self._tools.close()
        return pieces

    def _pieces(self, text: str) -> list[ReplyPiece]:
        if not text or self._called:
            return []
        if self._reasoning is None or self._reasoning.done:
            return self._answer(text)
        return self._sorted(self._reasoning.feed(text))

    def _sorted(self, parts: Sequence[str | Reasoning]) -> list[ReplyPiece]:
        pieces: list[ReplyPiece] = []
        for part in parts:
            if isinstance(part, Reasoning):
                self.reasoned = True
                pieces.append(part)
            else:
                pieces += self._answer(part)
        return pieces

    def _answer(self, text: str) -> list[ReplyPiece]:
        """Content and calls of text that is no reasoning."""
        if self._tools is None:
            return [text]
        pieces: list[ReplyPiece] = [*self._tools.feed(text)]
        calls = [at for at, piece in enumerate(pieces) if isinstance(piece, ToolCall)] if self._one_call else []
        if calls:
            self._called = True
            del pieces[calls[0] + 1 :]
        return pieces
