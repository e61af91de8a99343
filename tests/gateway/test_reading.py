"""Incremental decoding and stop strings agree with reading the whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.reading import ReplyReader, StopScanner, TextStream

codec = FakeChatCodec()
chunked = st.lists(st.lists(st.integers(0, 260), max_size=5), max_size=12)


@given(chunked)
def test_any_bytes_in_any_chunks(chunks: list[list[int]]) -> None:
    stream = TextStream(codec.decode)
    text = "".join(stream.feed(ids) for ids in chunks) + stream.close()
    assert text == codec.decode([i for ids in chunks for i in ids])


def test_half_a_character_is_held_back() -> None:
    stream = TextStream(codec.decode)
    emoji = "é😀".encode()
    assert [stream.feed([byte]) for byte in emoji] == ["", "é", "", "", "", "😀"]
    assert stream.feed(emoji[2:4]) == ""
    assert stream.close() == "\ufffd"


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_strings_cut_where_the_whole_text_would(text: str, stops: list[str], data: st.DataObject) -> None:
    scanner, at, out = StopScanner(stops), 0, ""
    while at < len(text) and not scanner.hit:
        size = 1 if data.draw(st.booleans()) else 2
        out += scanner.feed(text[at : at + size])
        at += size
    out += scanner.close()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert (scanner.hit in stops) == bool(ends)
    assert scanner.hit is None or scanner.hit in text
    # Which stop wins in one chunk may differ from character-wise reading, never that a stop is in the output.
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    assert ends or out == text


def test_tags_are_text_where_no_call_is_allowed() -> None:
    reader = ReplyReader(codec.decode, (), None)
    text = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert reader.feed(list(text.encode())) + reader.close() == [text]
    assert reader.malformed == 0
