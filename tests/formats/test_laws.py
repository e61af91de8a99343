"""What is rendered reads back, whole and in any chunks; nothing that can be fed raises, or is lost, or takes long."""

from __future__ import annotations

import json
import re
import time

import pytest
from formats_support import TRICKY, calls_in, names, read, said, tool_calls, tricky
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge.formats import FAMILIES, CannotCarryError, ToolCall, ToolFormat, formats
from forge.types import Json

ALL = list(formats().values())
DEFAULTS = [family() for family in FAMILIES]
#: every family as often as any other, and every variant of it
variants = st.sampled_from(FAMILIES).flatmap(lambda f: st.sampled_from([x for x in ALL if isinstance(x, f)]))
PLAIN = re.compile(r"[^\W\d]\w*")
chunks = st.lists(st.integers(1, 9), max_size=60)
lawful = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_law(tool_format: ToolFormat, content: str, calls: list[ToolCall], sizes: list[int]) -> None:
    text = tool_format.render(content, calls)
    pieces, reasons = read(tool_format, text)
    expected = ([content] if content else []) + [said(call, exact=tool_format.exact) for call in calls]
    assert [p if isinstance(p, str) else said(p, exact=tool_format.exact) for p in pieces] == expected
    assert reasons == []
    assert read(tool_format, text, sizes) == (pieces, [])
    assert read(tool_format, text, [1] * len(text)) == (pieces, [])


@settings(lawful, max_examples=200)
@given(variants, st.text(max_size=12).filter(lambda t: not set(t) & set("[@/!$><`~A:%")), st.data(), chunks)
def test_round_trip(tool_format: ToolFormat, content: str, data: st.DataObject, sizes: list[int]) -> None:
    assert_law(tool_format, content, data.draw(st.lists(tool_calls(), max_size=3)), sizes)


def test_every_variant_carries_what_all_must() -> None:
    """All of them, one by one, on calls that hold what ends or breaks others."""
    nested = {"a": {"b": [1, 1.0, True, None, "x", {}], "c": -0.0}, "s": "é😀\n\t", "e": "", "l": [], "n": 10**40}
    texts = {f"t{index}": text for index, text in enumerate(TRICKY)}
    calls = [ToolCall("get_weather", json.dumps(nested)), ToolCall("g", "{}"), ToolCall("h2", json.dumps(texts))]
    for tool_format in ALL:
        text = tool_format.render("Let me see.\n", calls)
        pieces, reasons = read(tool_format, text)
        assert pieces[0] == "Let me see.\n", tool_format.id
        told = [said(piece, exact=tool_format.exact) for piece in pieces[1:] if isinstance(piece, ToolCall)]
        assert told == [said(call, exact=tool_format.exact) for call in calls], tool_format.id
        assert reasons == []
        text.encode()


@settings(lawful, max_examples=200)
@given(variants, st.data(), chunks)
def test_anything_may_be_fed_in_any_chunks(tool_format: ToolFormat, data: st.DataObject, sizes: list[int]) -> None:
    """Parts of renderings, cut and mixed with marks. Text without a call in it comes back whole."""
    calls = data.draw(st.lists(tool_calls(), min_size=1, max_size=2))
    whole = tool_format.render(data.draw(tricky), calls)
    cuts = st.integers(0, len(whole))
    parts = [data.draw(tricky | st.tuples(cuts, cuts).map(lambda c: whole[min(c) : max(c)])) for _ in range(4)]
    text = "".join(parts)
    pieces, reasons = read(tool_format, text)
    assert read(tool_format, text, sizes) == (pieces, reasons)
    assert read(tool_format, text, [1] * len(text)) == (pieces, reasons)
    if not any(isinstance(piece, ToolCall) for piece in pieces):
        assert "".join(map(str, pieces)) == text
    for piece in pieces:
        if isinstance(piece, ToolCall):
            assert isinstance(json.loads(piece.arguments), dict)


@settings(lawful, max_examples=150)
@given(variants, st.data())
def test_a_broken_call_comes_back_as_text_with_a_reason(tool_format: ToolFormat, data: st.DataObject) -> None:
    """A whole call cut short anywhere behind its first half."""
    call = ToolCall("f", '{"a": {"b": [1, 2, {"c": "d"}]}, "e": "text"}')
    whole = tool_format.render("", [call])
    cut = data.draw(st.integers(len(whole) // 2, len(whole) - 1))
    pieces, reasons = read(tool_format, whole[:cut])
    if pieces != [whole[:cut]]:  # what was cut off is no part of the call
        assert [said(p, exact=False) for p in pieces if isinstance(p, ToolCall)] == [said(call, exact=False)]
        assert tool_format.id.startswith("harmony")
    else:
        assert len(reasons) == 1


@pytest.mark.parametrize("tool_format", DEFAULTS, ids=lambda one: one.id)
def test_work_is_linear(tool_format: ToolFormat) -> None:
    """Half a megabyte in small chunks, floods of openers that are none, deep nesting: what is quadratic in any of them
    takes minutes."""
    text = tool_format.render("x " * 20_000, [ToolCall("f", json.dumps({"a": 'say "x" ' * 50_000, "b": ["y"] * 9}))])
    opener = tool_format.render("", [ToolCall("f", "{}")])[:9]
    began = time.monotonic()
    pieces, reasons = read(tool_format, text, [40] * (len(text) // 40))
    assert [type(piece) for piece in pieces] == [str, ToolCall]
    assert reasons == []
    for flood in (opener * 10_000, (opener + "\n") * 10_000, " \n" * 50_000, opener + "[" * 50_000, "\\" * 50_000):
        read(tool_format, flood, [20] * (len(flood) // 20))
    assert time.monotonic() - began < 30


@settings(lawful, max_examples=150)
@given(variants, st.text(max_size=6) | names, st.dictionaries(st.text(max_size=4), tricky, max_size=2))
def test_what_cannot_be_carried_is_refused_and_nothing_else(
    tool_format: ToolFormat, name: str, arguments: Json
) -> None:
    """A rendering of a call with plain names is not refused, and what is not refused reads back."""
    call = ToolCall(name, json.dumps(arguments))
    try:
        text = tool_format.render("", [call])
    except CannotCarryError:
        assert not all(map(PLAIN.fullmatch, [name, *arguments])) or name in ("tool_use", "tool_call")
        return
    if name and name.isprintable() and name == name.strip():
        assert [said(one, exact=False) for one in calls_in(tool_format, text)] == [said(call, exact=False)]


@pytest.mark.parametrize("tool_format", [f for f in DEFAULTS if not f.exact], ids=lambda one: one.id)
@pytest.mark.parametrize("arguments", ['{"a": 1e400}', "[1]", "{broken", '{"a": NaN}', '{"a":' + "[" * 5000])
def test_arguments_that_are_no_json_object_are_refused(tool_format: ToolFormat, arguments: str) -> None:
    with pytest.raises(CannotCarryError, match="arguments of 'f'"):
        tool_format.render("", [ToolCall("f", arguments)])
