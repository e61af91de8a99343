"""The Hugging Face codec against transformers itself, on a tokenizer made on the spot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge.gateway.chat import HfChatCodec
from forge.gateway.chat_template import ChatError
from forge.gateway.prompt_tokens import PromptTokenizer
from forge.gateway.reading import TextStream
from forge.gateway.reasoning import Reasoning
from forge.types import ForgeError, Json

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = r"""{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' and m.content == 'refuse me' %}{{ raise_exception('no such user') }}{% endif %}
<|im_start|>{{ m.role }}
{% generation %}{{ m.content }}{% endgeneration %}
{%- for call in m.tool_calls or [] %}
{%- if loop.index > 9 %}{% break %}{% endif %}{{ '\n' }}
{%- set arguments = call.function.arguments | tojson(separators=(',',':')) %}
<tool_call>{"name":"{{ call.function.name }}","arguments":{{ arguments }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CORPUS = ['Hello there, what is 12 + 30? {"name": "add", "arguments": {"a": 1}} <tool_call></tool_call>'] * 20
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLED: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "add 1 and 2, café"},
    {
        "role": "assistant",
        "content": "On it.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2.0}'}},
            {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{broken"}},
        ],
    },
    {"role": "tool", "content": "3", "tool_call_id": "c1"},
    {"role": "tool", "content": "error", "tool_call_id": "c2"},
]


def write_tokenizer(folder: Path, template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    return folder


@pytest.fixture(scope="module")
def tools_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tools"), TOOLS)


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("plain"), PLAIN)


def test_same_ids_as_transformers(tools_dir: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tools_dir)
    ours = HfChatCodec(tools_dir)
    told = json.loads(json.dumps(CALLED))
    told[2]["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": 2.0}
    for messages, expected in ((CALLED, told), (CALLED[:2], told[:2])):
        for tools in ([], [TOOL]):
            want = theirs.apply_chat_template(
                expected, tools=tools or None, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            assert list(ours.prompt(messages, tools)) == list(want)
            assert list(ours.prompt(messages, tools)) == list(want)  # remembered pieces
    text = "<tool_call>é <|im_start|>x"
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.decode([*ids, 2]) == theirs.decode(ids) == text


def test_next_prompt_extends_prompt_and_reply(tools_dir: Path) -> None:
    codec = HfChatCodec(tools_dir)
    first = codec.prompt(CALLED[:2], [TOOL])
    reply = CALLED[2] | {"tool_calls": CALLED[2]["tool_calls"][:1]}
    sampled = PromptTokenizer(Tokenizer.from_file(str(tools_dir / "tokenizer.json"))).encode(
        'On it.\n<tool_call>{"name":"add","arguments":{"a":1,"b":2.0}}</tool_call><|im_end|>'
    )
    second = codec.prompt([*CALLED[:2], reply, CALLED[3]], [TOOL])
    assert second[: len(first) + len(sampled)] == first + sampled


def test_hermes_prompt_for_a_template_without_tools(plain_dir: Path) -> None:
    codec = HfChatCodec(plain_dir, tool_prompt="hermes")
    text = codec.decode(codec.prompt(CALLED, [TOOL]))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert json.dumps(TOOL) in text
    assert 'On it.\n<tool_call>{"name":"add","arguments":{"a": 1, "b": 2.0}}</tool_call>\n<tool_call>' in text
    results = "user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nerror\n</tool_response>"
    assert results in text
    alone = codec.decode(codec.prompt([{"role": "user", "content": "hi"}], [TOOL]))
    assert alone.startswith("<|im_start|>system\n# Tools")
    assert "# Tools" not in codec.decode(codec.prompt([{"role": "user", "content": "hi"}], []))


def test_template_refusal_and_non_text(tools_dir: Path) -> None:
    codec = HfChatCodec(tools_dir)
    with pytest.raises(ChatError, match="no such user"):
        codec.prompt([{"role": "user", "content": "refuse me"}], [])
    with pytest.raises(ChatError, match="surrogate"):
        codec.encode("\ud800")
    with pytest.raises(ChatError, match="surrogate"):
        codec.prompt([{"role": "user", "content": "\ud800"}], [])


def test_stop_ids_are_the_models_and_the_tokenizers(tools_dir: Path) -> None:
    codec = HfChatCodec(tools_dir)
    assert codec.stop_ids == (0, 2)
    assert codec.decode([0, 2]) == ""


#: tells past thoughts, and opens the next one where the user says so
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    "{% if messages[-1].content == 'think' %}{{ '<think>\n' }}{% endif %}"
)


def test_reasoning_of_templates_that_know_it(tmp_path: Path, plain_dir: Path) -> None:
    user, thinker = {"role": "user", "content": "hi"}, {"role": "user", "content": "think"}
    assert HfChatCodec(plain_dir).reasoning_stream(()) is None
    folder = write_tokenizer(tmp_path / "thinks", THINKING)
    for codec in (HfChatCodec(folder), HfChatCodec(folder, tool_prompt="hermes")):
        for asked, said in ((user, "<think>\nhm\n</think>\n\nyes"), (thinker, "hm\n</think>\n\nyes")):
            prompt = codec.prompt([asked], [])
            stream = codec.reasoning_stream(prompt)
            assert stream is not None
            assert stream.feed(said) == [Reasoning("hm"), "yes"]
            # What comes back is what was sampled, to the token.
            reply = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
            following = codec.prompt([asked, reply, user], [])
            served = prompt + codec.encode(said + "<|im_end|>")
            assert following[: len(served)] == served


def test_missing_files_name_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match=r"no tokenizer\.json"):
        HfChatCodec(tmp_path)
    folder = write_tokenizer(tmp_path / "x", PLAIN)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ForgeError, match="no chat template"):
        HfChatCodec(folder)
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ForgeError, match="line 1"):
        HfChatCodec(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.lists(st.text(max_size=6) | st.sampled_from([*SPECIAL, "<tool_call>", " ", "\n", "<|im_"]), max_size=12))
def test_remembered_pieces_change_no_id(tools_dir: Path, parts: list[str]) -> None:
    tokenizer = Tokenizer.from_file(str(tools_dir / "tokenizer.json"))
    tokens = PromptTokenizer(tokenizer)
    assert tokens.cached
    text = "".join(part for part in parts if part.isprintable() or part in "\n")
    for _ in range(2):
        assert list(tokens.encode(text)) == tokenizer.encode(text, add_special_tokens=False).ids


def test_tokenizers_whose_pieces_depend_on_each_other_run_uncached(tools_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tools_dir / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<greedy>", lstrip=True)])
    assert not PromptTokenizer(tokenizer).cached
    tokenizer = Tokenizer.from_file(str(tools_dir / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Prepend("_")
    assert not PromptTokenizer(tokenizer).cached


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 401), max_size=4), max_size=10))
def test_streamed_text_is_the_whole_text(tools_dir: Path, chunks: list[list[int]]) -> None:
    codec = HfChatCodec(tools_dir)
    stream = TextStream(codec.decode)
    text = "".join(stream.feed(ids) for ids in chunks) + stream.close()
    assert text == codec.decode([i for ids in chunks for i in ids])


def test_import_is_light() -> None:
    code = "import sys, forge.gateway.app; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
