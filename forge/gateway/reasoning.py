"""Reasoning before an answer: `<think>...</think>` at the beginning of a reply, told apart from what follows.

The newlines that templates write around the tags belong to neither side, so that a template which renders a past
turn's reasoning and content writes the very text that was sampled.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a reply that is thought, not said."""

    text: str


class ReasoningStream:
    """Incremental splitter of one reply. `opened`: the prompt itself ends with the opening tag.

    Text flows out at once; only what may be a tag or a newline beside one is held back. A reply that does not begin
    with a tag has no reasoning, one that ends before the closing tag has nothing else.
    """

    def __init__(self, *, opened: bool) -> None:
        self.opened = opened
        self._at: Literal["start", "thought", "gap", "answer"] = "thought" if opened else "start"
        self._held = ""
        self._begun = False

    @property
    def done(self) -> bool:
        """Everything from here on is the answer, as it is."""
        return self._at == "answer"

    def feed(self, text: str) -> list[str | Reasoning]:
        self._held += text
        out: list[str | Reasoning] = []
        if self._at == "start":
            self._start()
        if self._at == "thought":
            out += self._thought()
        if self._at == "gap":
            self._held = self._held.lstrip("\n")
            self._at = "answer" if self._held else "gap"
        if self._at == "answer" and self._held:
            out.append(self._held)
            self._held = ""
        return out

    def close(self) -> list[str | Reasoning]:
        rest, self._held = self._held, ""
        if not rest:
            return []
        return [Reasoning(rest) if self._at == "thought" else rest]

    def _start(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._at, self._held = "thought", text[len(OPEN) :]
        elif not OPEN.startswith(text):
            self._at = "answer"

    def _thought(self) -> list[str | Reasoning]:
        if not self._begun:
            self._held = self._held.lstrip("\n")
            self._begun = bool(self._held)
        end = self._held.find(CLOSE)
        if end >= 0:
            text, self._held = self._held[:end].rstrip("\n"), self._held[end + len(CLOSE) :]
            self._at = "gap"
        else:
            text = self._held[: len(self._held) - _held_back(self._held)]
            self._held = self._held[len(text) :]
        return [Reasoning(text)] if text else []


def _held_back(text: str) -> int:
    """Length of the end of `text` that may begin a closing tag, newlines before it included."""
    cut = text.rfind("<", max(0, len(text) - len(CLOSE) + 1))
    before = text[:cut] if cut >= 0 and CLOSE.startswith(text[cut:]) else text
    return len(text) - len(before.rstrip("\n"))


def reasoning_tokens(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> int:
    """How many of a reply's ids its reasoning took, the closing tag included; all of them where it never closed."""
    found = bisect.bisect_left(range(len(ids)), True, key=lambda n: CLOSE in decode(ids[: n + 1]))
    return min(found + 1, len(ids))
