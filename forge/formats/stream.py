"""The one incremental parser: text flows out, blocks are held until they end, and a block is read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forge.formats.base import MalformedError, Piece, ToolCall
from forge.formats.scan import Scanner

ReadBlock = Callable[[str], Sequence[ToolCall]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """How blocks stand in a text. `separator`, "" or a newline, goes before a block and is no content; so is white
    space between blocks. With `own_line` a block begins at the beginning of a line only. With `may_end` the end of the
    reply is an end of the block too."""

    opener: str
    scanner: Callable[[], Scanner]
    separator: str = "\n"
    own_line: bool = False
    may_end: bool = False

    def join(self, content: str, blocks: Sequence[str]) -> str:
        return self.separator.join([content, *blocks] if content else blocks)


class BlockStream:
    """`read` gets a block from its opener to its end and gives its calls: none if it is just text, which is no fault.
    It raises MalformedError, and nothing else. Each character is looked at once, whatever the chunks.
    """

    def __init__(self, frame: Frame, read: ReadBlock) -> None:
        self.reasons: list[str] = []
        self._frame, self._read = frame, read
        #: the end of the text so far, of which more must be known
        self._tail = ""
        #: white space after a call: a separator, an ending, or the beginning of more text
        self._gap: list[str] = []
        self._after_call = False
        self._line_began = True
        self._scanner: Scanner | None = None
        #: the open block, and what stood before it without being content
        self._block: list[str] = []
        self._lead = ""

    @property
    def malformed(self) -> int:
        return len(self.reasons)

    def feed(self, text: str) -> list[Piece]:
        text, self._tail, at = self._tail + text, "", 0
        pieces: list[Piece] = []
        while at >= 0:
            at = self._go_on_in_text(text, at, pieces) if self._scanner is None else self._go_on(text, at, pieces)
        return pieces

    def close(self) -> list[Piece]:
        """What was held back is text after all, unless it only ended the last call."""
        rest, self._tail = self._tail, ""
        pieces: list[Piece] = []
        if self._scanner is not None:
            self._block.append(rest)
            self._finish(pieces, closed=False)
        elif not self._after_call or rest.strip():
            self._say(rest, pieces)
        return pieces

    def _go_on_in_text(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Move text out up to the next opener. Index behind that, or -1: there is none yet."""
        start = self._find_opener(text, at)
        end = len(text) - self._held_back(text, at) if start < 0 else start
        said = text[at:end]
        if self._after_call and not said.strip():
            self._gap.append(said)
            lead, self._line_began = "", said.endswith("\n") if said else self._line_began
        else:
            kept = said.removesuffix(self._frame.separator) if start >= 0 else said
            lead = said[len(kept) :]
            self._say(kept, pieces)
        if start < 0:
            self._tail = text[end:]
            return -1
        self._lead = "".join([*self._gap, lead])
        self._gap.clear()
        self._block = [self._frame.opener]
        self._scanner = self._frame.scanner()
        return start + len(self._frame.opener)

    def _go_on(self, text: str, at: int, pieces: list[Piece]) -> int:
        """Take more of the block. Index behind it, or -1: it has not ended yet."""
        assert self._scanner is not None
        end, settled = self._scanner.scan(text, at)
        self._block.append(text[at:settled])
        if end < 0:
            self._tail = text[settled:]
        else:
            self._finish(pieces, closed=True)
        return end

    def _finish(self, pieces: list[Piece], *, closed: bool) -> None:
        block, self._scanner, self._block = "".join(self._block), None, []
        calls: Sequence[ToolCall] = ()
        try:
            calls = self._read(block)
            if calls and not closed and not self._frame.may_end:
                raise MalformedError("not closed")
        except MalformedError as error:
            calls = ()
            self.reasons.append(str(error))
        if calls:
            pieces += calls
            self._after_call = self._line_began = True
        else:
            self._say(self._lead + block, pieces)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append("".join([*self._gap, text]))
            self._gap.clear()
            self._after_call, self._line_began = False, text.endswith("\n")

    def _find_opener(self, text: str, at: int) -> int:
        start = text.find(self._frame.opener, at)
        while start >= 0 and not self._may_begin(text, at, start):
            start = text.find(self._frame.opener, start + 1)
        return start

    def _may_begin(self, text: str, at: int, start: int) -> bool:
        if not self._frame.own_line:
            return True
        return text[start - 1] == "\n" if start > at else self._line_began

    def _held_back(self, text: str, at: int) -> int:
        """Length of the longest end of the text that may begin an opener, its separator included."""
        opener = self._frame.opener
        longest = min(len(opener) - 1, len(text) - at)
        fits = (n for n in range(longest, 0, -1) if text.endswith(opener[:n]))
        held = next((n for n in fits if self._may_begin(text, at, len(text) - n)), 0)
        before = len(text) - held
        separated = self._frame.separator and before > at and text[before - 1] == "\n"
        return held + 1 if separated else held
