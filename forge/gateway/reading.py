"""Sampled ids to what a client may see, as they arrive: ids -> text -> stop strings -> content and tool calls.

The whole-reply path is the same code fed once, so a streamed and a whole reply never differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forge.gateway.tool_format import Piece, ToolStream

Decode = Callable[[Sequence[int]], str]


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
        self.hit = False

    def feed(self, text: str) -> str:
        if not self._stops or self.hit:
            return "" if self.hit else text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
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
    """One reply being read. `tools` is None where no call may be made: then tags are just text."""

    def __init__(self, decode: Decode, stops: Sequence[str], tools: ToolStream | None) -> None:
        self._text = TextStream(decode)
        self._stops = StopScanner(stops)
        self._tools = tools

    @property
    def stopped(self) -> bool:
        """A stop string was read: nothing after it belongs to the reply."""
        return self._stops.hit

    @property
    def malformed(self) -> int:
        return self._tools.malformed if self._tools else 0

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        return self._pieces(self._stops.feed(self._text.feed(ids)))

    def close(self) -> list[Piece]:
        pieces = self._pieces(self._stops.feed(self._text.close()) + self._stops.close())
        return pieces + self._tools.close() if self._tools else pieces

    def _pieces(self, text: str) -> list[Piece]:
        if not text:
            return []
        return self._tools.feed(text) if self._tools else [text]
