"""The Hermes tool-call format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` inside the text.

Parsing never raises: what is not a well-formed call comes back as the text it is, and is counted as malformed.
A call is handed out only when its closing tag has been read and its JSON is sound. Agents do wild things with
broken arguments (one repairs and executes them), so a streamed call is as trustworthy as one in a whole reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\n\r]*")
_QUOTE_OR_CLOSE = re.compile(r'\\.|"|' + re.escape(CLOSE), re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is the JSON text of an object, byte for byte as the policy wrote it."""

    name: str
    arguments: str


Piece = str | ToolCall


class ToolStream(Protocol):
    """Turns a reply's text, as it arrives, into pieces in order. `feed` after `close` is an error of ours."""

    malformed: int

    def feed(self, text: str) -> list[Piece]: ...

    def close(self) -> list[Piece]: ...


def render(content: str, calls: Sequence[ToolCall]) -> str:
    """The text of an assistant turn: content, then one tag per line. `parse` gives both back."""
    tags = (f'{OPEN}{{"name":{_dump(call.name)},"arguments":{call.arguments}}}{CLOSE}' for call in calls)
    return "\n".join([content, *tags] if content else list(tags))


def parse(text: str) -> tuple[str, list[ToolCall], int]:
    """(content, calls, malformed) of a whole reply."""
    stream = HermesStream()
    pieces = [*stream.feed(text), *stream.close()]
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    return content, [piece for piece in pieces if isinstance(piece, ToolCall)], stream.malformed


class HermesStream:
    """Incremental parser. Text flows out at once; only what may belong to a tag or a call is held back.

    One newline before an opening tag is the separator `render` writes, not content; so is white space between
    calls. Text after the last call is content.
    """

    def __init__(self) -> None:
        self.malformed = 0
        self._held = ""
        self._after_call = False
        #: index of the opening tag in the held text, its separator before it; -1 outside a call
        self._open = -1
        #: where the search for the closing tag goes on, and whether that place lies inside a JSON string
        self._scanned = 0
        self._in_string = False

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._take_call(pieces) if self._open >= 0 else self._take_text(pieces):
            pass
        return pieces

    def close(self) -> list[Piece]:
        """What was held back is text after all; an unclosed call is malformed."""
        rest, self._held = self._held, ""
        if self._open >= 0:
            self.malformed += 1
        elif self._after_call and not rest.strip():
            return []
        return [rest] if rest else []

    def _take_text(self, pieces: list[Piece]) -> bool:
        """Move text out up to the next opening tag and its separator; True when there is one."""
        start = self._held.find(OPEN)
        end = len(self._held) - _held_back(self._held) if start < 0 else start
        text = self._held[:end]
        if self._after_call and not text.strip():
            # White space after a call is a separator or an ending: undecided until something else follows.
            text = ""
        elif start >= 0:
            text = text.removesuffix("\n")
        if start >= 0:
            self._open = start - len(text)
            self._scanned, self._in_string = self._open + len(OPEN), False
        if text:
            self._after_call = False
            self._held = self._held[len(text) :]
            pieces.append(text)
        return start >= 0

    def _take_call(self, pieces: list[Piece]) -> bool:
        """Move one call out; True when its closing tag was found, whatever lay inside."""
        end = self._find_close()
        if end < 0:
            return False
        block, self._held = self._held[:end], self._held[end:]
        call = _parse_call(block[self._open + len(OPEN) : -len(CLOSE)])
        self._open = -1
        self._after_call = call is not None
        self.malformed += call is None
        pieces.append(block if call is None else call)
        return True

    def _find_close(self) -> int:
        """End of the first closing tag outside JSON strings, or -1; never looks at a character twice."""
        for found in _QUOTE_OR_CLOSE.finditer(self._held, self._scanned):
            token = found.group()
            if token == '"':
                self._in_string = not self._in_string
            elif token == CLOSE and not self._in_string:
                return found.end()
            self._scanned = found.end()
        # A tag or an escape may be cut off at the end: look at the last few characters again next time.
        tail = max(self._scanned, len(self._held) - len(CLOSE) + 1)
        cut = self._held.find("\\", tail)
        self._scanned = tail if cut < 0 else cut
        return -1


def _held_back(text: str) -> int:
    """Length of the longest end of `text` that may begin an opening tag, its separating newline included."""
    cut = text.rfind("<", max(0, len(text) - len(OPEN) + 1))
    held = len(text) - cut if cut >= 0 and OPEN.startswith(text[cut:]) else 0
    before = len(text) - held
    return held + 1 if text[:before].endswith("\n") else held


def _parse_call(text: str) -> ToolCall | None:
    """The call in a tag's inside, or None. Unknown members are ignored; the last of a repeated one counts."""
    try:
        members = _members(text)
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    arguments, text = members.get("arguments", (None, ""))
    if not isinstance(name, str) or not name or not name.isprintable() or not isinstance(arguments, dict):
        return None
    return ToolCall(name, text)


def _members(text: str) -> dict[str, tuple[object, str]]:
    """Members of a JSON object as (value, its exact text). ValueError for anything else."""
    members: dict[str, tuple[object, str]] = {}
    at = _expect(text, 0, "{")
    while True:
        key, end = _decoder.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a member needs a name")
        start = _expect(text, end, ":")
        value, end = _decoder.raw_decode(text, start)
        members[key] = (value, text[start:end])
        after = _skip_space(text, end)
        if text[after : after + 1] != ",":
            break
        at = _expect(text, after, ",")
    if _expect(text, after, "}") != len(text):
        raise ValueError("text after the object")
    return members


def _expect(text: str, at: int, mark: str) -> int:
    """Index of the first non-space after `mark`, which must come next."""
    at = _skip_space(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark}")
    return _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _dump(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


_decoder = json.JSONDecoder(parse_constant=_no_constant)
