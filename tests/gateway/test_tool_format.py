"""Hermes tool calls: render and parse are inverse, streaming changes nothing, nothing ever raises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.gateway.tool_format import CLOSE, OPEN, HermesStream, Piece, ToolCall, parse, render

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
tricky = st.sampled_from([OPEN, CLOSE, '"', "\\", "{", "}", "\n", " ", "<", "<tool", "</tool_call", "é😀", ","])
names = st.text(min_size=1, max_size=12).filter(str.isprintable)
texts = st.lists(st.text(max_size=4) | tricky, max_size=8).map("".join)


@st.composite
def tool_calls(draw: st.DrawFn) -> ToolCall:
    arguments = draw(st.dictionaries(texts, json_values | texts, max_size=3))
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 1]))
    return ToolCall(draw(names), json.dumps(arguments, ensure_ascii=ascii_only, indent=indent))


def streamed(text: str, sizes: list[int]) -> tuple[list[Piece], int]:
    """Pieces of a text fed in chunks of these sizes, adjacent texts joined."""
    stream, at, pieces = HermesStream(), 0, []
    for size in sizes:
        pieces += stream.feed(text[at : at + size])
        at += size
    pieces += stream.feed(text[at:]) + stream.close()
    joined: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined, stream.malformed


@settings(max_examples=60, deadline=None)
@given(texts.filter(lambda text: OPEN not in text), st.lists(tool_calls(), max_size=3))
def test_round_trip(content: str, calls: list[ToolCall]) -> None:
    assert parse(render(content, calls)) == (content, calls, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts | tool_calls(), max_size=5), st.lists(st.integers(1, 9), max_size=60))
def test_chunks_do_not_matter(parts: list[str | ToolCall], sizes: list[int]) -> None:
    text = "".join(part if isinstance(part, str) else render("", [part]) for part in parts)
    assert streamed(text, sizes) == streamed(text, [])
    assert streamed(text, [1] * len(text)) == streamed(text, [])


@settings(max_examples=60, deadline=None)
@given(texts)
def test_text_without_sound_calls_comes_back_unchanged(text: str) -> None:
    content, calls, malformed = parse(text)
    if not calls:
        assert content == text
    assert bool(malformed) <= (OPEN in text)


@pytest.mark.parametrize(
    "inside",
    [
        "", "{}", "[]", "null", "{", '{"name":"f"}', '{"name":"f","arguments":"{}"}', '{"name":"f","arguments":[]}',
        '{"name":"","arguments":{}}', '{"name":1,"arguments":{}}', '{"name":"f","arguments":{"a":NaN}}',
        '{"name":"f","arguments":{}} x', '{"name":"f","arguments":{},}', "{'name':'f','arguments':{}}",
        '{"name":"f","arguments":{"a":' + "[" * 100_000 + "}}", '{"name":"f","arguments":{"a":' + "9" * 5000 + "}}",
        '{"name":"\\ud800","arguments":{}}', '{1:2}', '{"name":"f","arguments":{"a":"line\nbreak"}}',
    ],
)  # fmt: skip
def test_malformed_is_text(inside: str) -> None:
    text = f"before\n{OPEN}{inside}{CLOSE} after"
    assert parse(text) == (text, [], 1)
    assert parse(text + render("", [ToolCall("g", "{}")])) == (text, [ToolCall("g", "{}")], 1)


def test_unclosed_is_text() -> None:
    text = f'so\n{OPEN}{{"name":"f","arguments":{{}}}}'
    assert parse(text) == (text, [], 1)


def test_other_models_white_space() -> None:
    first, second = '{"name": "f", "arguments": {"a": 1.0}}', ' {"arguments":{},"name":"g"}'
    text = f"\n{OPEN}\n{first}\n{CLOSE}\n{OPEN}{second}{CLOSE}\n"
    assert parse(text) == ("", [ToolCall("f", '{"a": 1.0}'), ToolCall("g", "{}")], 0)


def test_text_flows_before_a_call_and_nothing_of_it_leaks() -> None:
    stream = HermesStream()
    assert stream.feed("Let me see <") == ["Let me see "]
    assert stream.feed("b>") == ["<b>"]
    assert stream.feed("\n<tool_") == []
    assert stream.feed('call>{"name":"f","arg') == []
    assert stream.feed('uments":{}}</tool_call>') == [ToolCall("f", "{}")]
    assert stream.close() == []
