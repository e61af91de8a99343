"""Where a block ends: scanners that look at no character twice, however the text arrives."""

from __future__ import annotations

import re
from functools import cache
from typing import Protocol


class Scanner(Protocol):
    """One block's end, sought in its text as it comes."""

    def scan(self, text: str, at: int) -> tuple[int, int]:
        """Go on in `text` from `at`. Where the block ends, or -1; and up to where the text is settled: the next call
        gets a text that begins there. What is not settled is shorter than the longest mark."""
        ...


@cache
def _tokens(quotes: str, *marks: str) -> re.Pattern[str]:
    alternatives = [r"\\.", *quotes] if quotes else []
    return re.compile("|".join([*alternatives, *map(re.escape, marks)]), re.DOTALL)


class UntilMark:
    """The block ends with its first `mark` that is not between quotes. Backslashes escape where there are quotes."""

    def __init__(self, mark: str, quotes: str = "") -> None:
        self._mark, self._quotes = mark, quotes
        self._tokens = _tokens(quotes, mark)
        self._quote = ""

    def scan(self, text: str, at: int) -> tuple[int, int]:
        for found in self._tokens.finditer(text, at):
            token, at = found.group(), found.end()
            if token == self._mark:
                if not self._quote:
                    return at, at
            elif token in self._quotes:
                self._quote = _quote_after(self._quote, token)
        # A mark or an escape may be cut off at the end.
        tail = max(at, len(text) - len(self._mark) + 1)
        cut = text.find("\\", tail) if self._quotes else -1
        return -1, tail if cut < 0 else cut


class Balanced:
    """The block ends with the bracket that closes the first one; with `depth` 1 that one is already open.

    Before its first bracket a block has at most `lines` line ends: beyond them it ends, without one.
    """

    def __init__(self, brackets: str, quotes: str = '"', *, depth: int = 0, lines: int = 1) -> None:
        self._open, self._close = brackets[0], brackets[1]
        self._quotes = quotes
        self._tokens = _tokens(quotes, *brackets, "\n")
        self._depth, self._lines = depth, lines
        self._quote = ""

    def scan(self, text: str, at: int) -> tuple[int, int]:
        for found in self._tokens.finditer(text, at):
            at = found.end()
            if self._ends(found.group()):
                return at, at
        cut = text.find("\\", at)
        return -1, len(text) if cut < 0 else cut

    def _ends(self, token: str) -> bool:
        if not self._depth:
            self._depth += token == self._open
            self._lines -= token == "\n"
            return self._lines < 0
        if token in self._quotes:
            self._quote = _quote_after(self._quote, token)
        elif not self._quote:
            self._depth += (token == self._open) - (token == self._close)
        return not self._depth


def _quote_after(quote: str, token: str) -> str:
    """The quote one is within after this one: another kind changes nothing."""
    return "" if quote == token else quote or token
