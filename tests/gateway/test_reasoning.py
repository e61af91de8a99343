"""Reasoning is told apart from the answer, whatever the chunks, and nothing of either is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.reading import ReplyPiece, ReplyReader
from forge.gateway.reasoning import CLOSE, OPEN, Reasoning, ReasoningStream, reasoning_tokens
from forge.gateway.tool_format import HermesStream, ToolCall

codec = FakeChatCodec()
tricky = st.sampled_from([OPEN, CLOSE, "\n", "<", "</", "<thi", "think>", " ", "a", "é"])
texts = st.lists(tricky, max_size=10).map("".join)


def split(chunks: list[str], *, opened: bool = False) -> tuple[str, str]:
    """(reasoning, answer) of a reply fed in these chunks."""
    stream = ReasoningStream(opened=opened)
    parts = [part for chunk in chunks for part in stream.feed(chunk)] + stream.close()
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    return thought, "".join(part for part in parts if isinstance(part, str))


@given(texts, st.lists(st.integers(1, 4), max_size=40), st.booleans())
def test_chunks_do_not_matter(text: str, sizes: list[int], opened: bool) -> None:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(text[at : at + size])
        at += size
    assert split([*chunks, text[at:]], opened=opened) == split([text], opened=opened)


@given(st.text("ab <é", max_size=8), st.text("ab\n<é", max_size=8))
def test_what_templates_write_comes_apart_again(thought: str, answer: str) -> None:
    answer = answer.lstrip("\n")
    assert split([f"{OPEN}\n{thought}\n{CLOSE}\n\n{answer}"]) == (thought, answer)
    assert split([f"{thought}\n{CLOSE}\n\n{answer}"], opened=True) == (thought, answer)


def test_what_is_no_reasoning_is_the_answer_as_it_is() -> None:
    for text in ("plain", "\n plain", "<thin", "so <think>x</think>", "", " \n", "</think>x"):
        assert split(list(text)) == ("", text)
    assert split(["<think>\nnever closed\n"]) == ("never closed\n", "")
    assert split(["<think></think>\nok"]) == ("", "ok")


def test_a_call_in_a_thought_is_no_call() -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    text = f"<think>I could {call}</think>\n\nOn it.\n{call}"
    for size in (1, 7, len(text)):
        reader = ReplyReader(codec.decode, (), HermesStream(), ReasoningStream(opened=False))
        ids = list(text.encode())
        pieces: list[ReplyPiece] = []
        for at in range(0, len(ids), size):
            pieces += reader.feed(ids[at : at + size])
        pieces += reader.close()
        assert "".join(p.text for p in pieces if isinstance(p, Reasoning)) == f"I could {call}"
        assert "".join(p for p in pieces if isinstance(p, str)) == "On it."
        assert [p for p in pieces if isinstance(p, ToolCall)] == [ToolCall("f", "{}")]
        assert reader.reasoned


def test_tokens_of_a_thought_end_with_its_tag() -> None:
    ids = list(f"{OPEN}abc{CLOSE}answer".encode())
    assert reasoning_tokens(codec.decode, ids) == len(f"{OPEN}abc{CLOSE}")
    assert reasoning_tokens(codec.decode, ids[:9]) == 9
    assert reasoning_tokens(codec.decode, []) == 0


def test_a_reply_of_one_call_ends_with_it() -> None:
    call = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    reader = ReplyReader(codec.decode, tools=HermesStream(), one_call=True)
    assert reader.feed(list(f"a\n{call}\n{call}b".encode())) == ["a", ToolCall("f", "{}")]
    assert reader.stopped
    assert reader.feed(list(b"more")) + reader.close() == []
