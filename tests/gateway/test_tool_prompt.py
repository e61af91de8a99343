"""Any tool format through the codec: described in the prompt, calls and results as its text, replies read by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_chat import PLAIN, TOOL, TOOLS, write_tokenizer

from forge.formats import FAMILIES, ToolCall, get
from forge.gateway import conversation
from forge.gateway.chat import HfChatCodec
from forge.gateway.chat_template import ChatError
from forge.scenario import parse
from forge.types import ForgeError, Json

ASKED: list[Json] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 and 2?"}]
CALL = ToolCall("add", '{"a": 1, "b": 2.0}')
ECHO = conversation.assistant("On it.", "", [conversation.call("c1", CALL.name, CALL.arguments)])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.mark.parametrize("name", [family.family for family in FAMILIES])
def test_a_turn_with_a_call(plain: Path, name: str) -> None:
    """What is sampled is read as the call, and the echo of it is what was sampled, to the token."""
    codec, tool_format = HfChatCodec(plain, name), get(name)
    first = codec.prompt(ASKED, [TOOL])
    assert json.dumps(TOOL) in codec.decode(first)
    sampled = codec.encode(tool_format.render("On it.", [CALL]) + "<|im_end|>")
    stream = codec.tool_stream([TOOL])
    assert [*stream.feed(codec.decode(sampled)), *stream.close()] == ["On it.", CALL]
    second = codec.prompt([*ASKED, ECHO, conversation.tool_result("c1", "3.0")], [TOOL])
    assert second[: len(first) + len(sampled)] == first + sampled
    assert "3.0" in codec.decode(second[len(first) + len(sampled) :])
    assert codec.continuation([*ASKED, ECHO], [conversation.tool_result("c1", "3")], [TOOL], 2) is not None


def test_results_carry_the_names_of_their_calls(plain: Path) -> None:
    codec = HfChatCodec(plain, "kimi-k2")
    text = codec.decode(codec.prompt([*ASKED, ECHO, conversation.tool_result("c1", "3")], [TOOL]))
    assert "## Return of add\n3\n" in text


def test_a_call_that_a_format_cannot_carry_is_the_clients_to_mend(plain: Path) -> None:
    broken = conversation.assistant("", "", [conversation.call("c1", "add", "{broken")])
    with pytest.raises(ChatError, match="tool format xml: arguments of 'add'"):
        HfChatCodec(plain, "xml").prompt([*ASKED, broken], [TOOL])


def test_a_template_with_tools_and_another_format_of_replies(tmp_path: Path) -> None:
    codec = HfChatCodec(write_tokenizer(tmp_path / "tools", TOOLS), "template:qwen3-coder")
    assert codec.decode(codec.prompt(ASKED, [TOOL])).startswith("<|im_start|>system\n" + json.dumps(TOOL))
    schema: Json = {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "string"}}}}}
    text = get("qwen3-coder").render("", [ToolCall("add", '{"a": 5}')])
    stream = codec.tool_stream([schema])
    assert [*stream.feed(text), *stream.close()] == [ToolCall("add", '{"a": "5"}')]


def test_scenario_and_unknown_formats(plain: Path) -> None:
    least = {"name": "x", "stop": {"items": 1}, "domains": [{"name": "any"}]}
    assert parse(least | {"model": {"tool_prompt": "react"}}, "here").model.tool_prompt == "react"
    with pytest.raises(ForgeError, match=r"model\.tool_prompt.*'reakt'.*near: react"):
        parse(least | {"model": {"tool_prompt": "reakt"}}, "here")
    with pytest.raises(ForgeError, match="tool format 'hermez': there is none; near: hermes"):
        HfChatCodec(plain, "hermez")
