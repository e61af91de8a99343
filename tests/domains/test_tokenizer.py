"""The tokenizer and chat template: any text round-trips, and a conversation only ever grows."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from forge.agents.experts import PERFECT, SLOPPY, demonstrate
from forge.domains.registry import PURE, get_domain
from forge.domains.tokenizer import END, load_tokenizer
from forge.train.warm_start import tokenizer as built

ASSET = Path(__file__).parents[2] / "forge" / "assets" / "quickstart"
TOKENS = load_tokenizer(ASSET)


def ids_of(messages: list[dict[str, Any]], *, prompt: bool = False) -> list[int]:
    ids: list[int] = TOKENS.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
    return ids


def test_the_committed_tokenizer_is_the_one_the_code_builds() -> None:
    assert built().get_vocab() == TOKENS.get_vocab()
    assert built().chat_template == TOKENS.chat_template


@given(text=st.text())
def test_any_text_without_special_tokens_round_trips(text: str) -> None:
    assert TOKENS.decode(TOKENS(text)["input_ids"]) == text


@given(name=st.sampled_from(sorted(PURE)), seed=st.integers(0, 2**31), sloppy=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_conversation_is_append_only(name: str, seed: int, sloppy: bool) -> None:
    domain = get_domain(name)
    task = domain.task("train", seed, 0)
    messages = demonstrate(domain, task, Random(seed), SLOPPY if sloppy else PERFECT)
    whole = ids_of(messages)
    assert TOKENS.decode(whole) == TOKENS.apply_chat_template(messages, tokenize=False)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = ids_of(messages[:turn], prompt=True), ids_of(messages[: turn + 1])
        assert after[: len(before)] == before
        assert after[-1] == TOKENS.eos_token_id
        assert whole[: len(after)] == after
        # What the engine samples, decoded and encoded again, is what the template renders.
        said = TOKENS.decode(after[len(before) : -1])
        assert [*before, *TOKENS(said)["input_ids"], TOKENS.eos_token_id] == after


@given(arguments=st.dictionaries(st.text(), st.text(), max_size=3))
def test_a_call_renders_as_compact_json_and_parses_back(arguments: dict[str, str]) -> None:
    compact = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
    rendered = {
        TOKENS.apply_chat_template(
            [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": value}}]}],
            tokenize=False,
        )
        for value in (arguments, compact)
    }
    assert rendered == {f'<|assistant|><tool_call>{{"name":"f","arguments":{compact}}}</tool_call>{END}'}


def test_a_tool_call_costs_eight_tokens_besides_its_payload() -> None:
    call = '<tool_call>{"name":"calc","arguments":{"expression":"34*57-8"}}</tool_call>'
    assert len(TOKENS(call)["input_ids"]) == 8 + len(["34", "*", "57", "-", "8"])


def test_the_template_takes_text_parts_tools_and_a_system_prompt_and_refuses_other_roles() -> None:
    messages = [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    tools = get_domain("calc").tools(get_domain("calc").task("train", 0, 0))
    text = TOKENS.apply_chat_template(messages, tools=list(tools), tokenize=False, add_generation_prompt=True)
    assert text == f"<|system|>x{END}<|user|>ab{END}<|assistant|>"
    with pytest.raises(TemplateError, match="unknown role wizard"):
        ids_of([{"role": "wizard", "content": "x"}])
