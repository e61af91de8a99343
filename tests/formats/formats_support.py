"""Calls and texts for formats, and the law itself."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from forge.formats import ToolCall, ToolFormat
from forge.formats.base import Piece

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
#: marks of many formats, what looks like JSON, what ends strings, what ends lines
TRICKY = [
    "<tool_call>", "</tool_call>", "</parameter>", "</function_calls>", "</arg_value>", "</tool_use>", "</f>", "@end",
    "[TOOL_CALLS]", "[ARGS]", "```", "```json\n", "\n```", "<|call|>", "<|tool_call_end|>", "Action: ", "\nAction: f\n",
    "<｜tool▁call▁end｜>", "</｜DSML｜parameter>", ">>>", "::", "%%", "[end]", "!done", "]", ")", "}", "{", "[f(", "[",
    '"', "'", "\\", "\\\\'", "\n", "\r", " ", "<", "</", "&lt;", "&", "5", "true", "null", '"x"', "1e400", "NaN", "-",
    "\x00", "\x1b", "\u2028", "\ud800", "é😀", ",", "=", ":", "#END#", "</TOOLCALL>", "<|END_ACTION|>", "~~~",
]  # fmt: skip
tricky = st.lists(st.text(max_size=3) | st.sampled_from(TRICKY), max_size=6).map("".join)
#: what every format carries
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,7}", fullmatch=True)


@st.composite
def tool_calls(draw: st.DrawFn) -> ToolCall:
    arguments = draw(st.dictionaries(names, json_values | tricky, max_size=4))
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    has_surrogate = any("\ud800" <= character <= "\udfff" for character in str(arguments))
    return ToolCall(draw(names), json.dumps(arguments, ensure_ascii=ascii_only or has_surrogate, indent=indent))


def read(tool_format: ToolFormat, text: str, sizes: list[int] | None = None) -> tuple[list[Piece], list[str]]:
    """Pieces of a text fed in chunks of these sizes, adjacent texts joined, and why blocks were malformed."""
    stream, at = tool_format.stream(), 0
    pieces: list[Piece] = []
    for size in sizes or []:
        pieces += stream.feed(text[at : at + size])
        at += size
    pieces += stream.feed(text[at:]) + stream.close()
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    assert stream.malformed == len(stream.reasons)
    return joined, stream.reasons


def calls_in(tool_format: ToolFormat, text: str) -> list[ToolCall]:
    return [piece for piece in read(tool_format, text)[0] if isinstance(piece, ToolCall)]


def said(call: ToolCall, *, exact: bool) -> tuple[str, Any]:
    """A call as it is to come back: 1, 1.0 and True are not the same."""
    return call.name, call.arguments if exact else typed(json.loads(call.arguments))


def typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    if isinstance(value, list):
        return [typed(one) for one in value]
    return type(value).__name__, repr(value)
