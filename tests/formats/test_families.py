"""Families: as published, apart from each other, and each variant a format of its own."""

from __future__ import annotations

import json

import pytest
from formats_support import calls_in, read

from forge.formats import FAMILIES, PUBLISHED, ToolCall, ToolFormat, ToolResult, formats, get, tool_prompting
from forge.types import ForgeError, Json

CITY = ToolCall("get_weather", '{"city": "Paris", "days": 2}')
OTHER = ToolCall("now", "{}")
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}

#: turns of CITY after "Hm.", as the models' own templates write them
GOLDEN = {
    "hermes": 'Hm.\n<tool_call>{"name":"get_weather","arguments":{"city": "Paris", "days": 2}}</tool_call>',
    "qwen3": 'Hm.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>',
    "llama3": 'Hm.\n{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}',
    "llama3-function-tag": 'Hm.\n<function=get_weather>{"city": "Paris", "days": 2}</function>',
    "llama3.2-pythonic": "Hm.\n[get_weather(city='Paris', days=2)]",
    "llama4-pythonic": "Hm.\n<|python_start|>[get_weather(city='Paris', days=2)]<|python_end|>",
    "lfm2": "Hm.\n<|tool_call_start|>[get_weather(city='Paris', days=2)]<|tool_call_end|>",
    "olmo3": 'Hm.\n<function_calls>get_weather(city="Paris", days=2)</function_calls>',
    "gemma-tool-code": 'Hm.\n```tool_code\nget_weather(city="Paris", days=2)\n```',
    "nemotron": 'Hm.\n<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]</TOOLCALL>',
    "jamba": 'Hm.\n<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]</tool_calls>',
    "granite": 'Hm.\n<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "phi4-mini": 'Hm.\nfunctools[{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "command-a": (
        'Hm.\n<|START_ACTION|>[{"tool_name": "get_weather", "parameters": {"city": "Paris", "days": 2}}]<|END_ACTION|>'
    ),
    "mistral-v3": 'Hm.[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}]',
    "mistral-args": 'Hm.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 2}',
    "deepseek-v3": (
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek-v3.1": (
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek-v3.2": (
        'Hm.\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "kimi-k2": (
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "gpt-oss": (
        "Hm.<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Paris", "days": 2}<|call|>'
    ),
    "claude": (
        'Hm.\n<function_calls>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</function_calls>'
    ),
    "minimax-m2": (
        'Hm.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "qwen3-coder": (
        "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    "glm-4.5": (
        "Hm.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
    "react": 'Hm.\nAction: get_weather\nAction Input: {"city": "Paris", "days": 2}',
    "fence": 'Hm.\n```json\n{"tool": "get_weather", "args": {"city": "Paris", "days": 2}}\n```',
}


@pytest.mark.parametrize("name", GOLDEN)
def test_as_published(name: str) -> None:
    tool_format = get(name)
    assert tool_format.render("Hm.", [CITY]) == GOLDEN[name]
    assert read(tool_format, GOLDEN[name]) == (["Hm.", CITY], [])
    assert [one.name for one in calls_in(tool_format, tool_format.render("", [CITY, OTHER]))] == ["get_weather", "now"]


#: format, what a model wrote, in which white space is not the template's, and the calls
LOOSE = [
    ("qwen3-coder", "<tool_call><function=get_weather><parameter=city>Paris</parameter><parameter=days>2</parameter>"
     "</function></tool_call>"),
    ("minimax-m2", '<minimax:tool_call><invoke name="get_weather"><parameter name="city">Paris</parameter>\n'
     ' <parameter name="days"> 2 </parameter></invoke></minimax:tool_call>'),
    ("glm-4.7", "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
     "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"),
    ("kimi-k2", "<|tool_calls_section_begin|>\n<|tool_call_begin|>\nfunctions.get_weather:22"
     '<|tool_call_argument_begin|>\n{"city": "Paris", "days": 2}\n<|tool_call_end|>\n<|tool_calls_section_end|>'),
    ("gpt-oss", "<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>"
     '{"city": "Paris", "days": 2}'),
    ("mistral-v3", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}, "id": "9Ae3"}]'),
    ("granite", '<|tool_call|> [{"arguments": {"city": "Paris", "days": 2}, "name": "get_weather"}]'),
    ("gemma-tool-code", "```tool_code\nget_weather(\n  city = 'Par' \"is\",\n  days=2,\n)\n```"),
    ("react", 'Action:  get_weather\nAction Input:\n{"city": "Paris", "days": 2}'.replace("Action:  ", "Action: ")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), LOOSE)
def test_white_space_that_models_write(name: str, text: str) -> None:
    assert read(get(name), text) == ([CITY], [])


def test_there_are_enough() -> None:
    assert len(formats()) >= 2000
    assert len(FAMILIES) >= 12
    assert all(get(name) is one for name, one in formats().items())
    assert all(one in formats() for one in PUBLISHED.values())


def test_every_variant_writes_something_else() -> None:
    """Of two calls with text, an entity and a number: no two formats are one by two names."""
    probe = [ToolCall("get_weather", '{"city": "a < b", "days": 2}'), OTHER]
    written: dict[str, str] = {}
    for name, one in formats().items():
        text = one.render("Hm.", probe)
        assert written.setdefault(text, name) == name


@pytest.mark.parametrize("writer", [family.family for family in FAMILIES])
def test_families_do_not_read_each_other(writer: str) -> None:
    text = get(writer).render("Hm.", [CITY, OTHER])
    reads = {reader.family for reader in FAMILIES if calls_in(get(reader.family), text)}
    assert reads == {writer}


def test_known_siblings() -> None:
    """An object that stands alone on a line is a bare one's call, whatever stands around it: of the same keys, those of
    fences, padded tags and lists in lines are read by `json`."""
    around = ("fence:keys=name/parameters", "hermes:keys=name/parameters,space=spaced,pad=yes")
    for name, reader in ((around[0], "json"), (around[1], "json"), ("list:keys=name/parameters,space=lines", LINES)):
        assert calls_in(get(reader), get(name).render("", [CITY])) == [CITY], name


LINES = "json:space=lines"


@pytest.mark.parametrize("name", [*[family.family for family in FAMILIES], *PUBLISHED])
def test_description_shows_tools_and_a_call_that_reads_back(name: str) -> None:
    tool_format = get(name)
    told = tool_format.describe([TOOL])
    assert json.dumps(TOOL) in told
    if name != "hermes":
        example = ToolCall("example_tool", '{"first": "some text", "second": 2}')
        assert tool_format.render("", [example]) in told
    results = tool_format.render_results([ToolResult("get_weather", "12 degrees"), ToolResult("now", "noon")])
    assert results.index("12 degrees") < results.index("noon")
    assert not calls_in(tool_format, results)


def test_a_schema_settles_what_is_not_marked() -> None:
    text = get("qwen3-coder").render("", [ToolCall("f", '{"a": "5"}')]).replace('"5"', "5")
    for kind, value in (("string", "5"), ("integer", 5), (None, 5), (["string"], 5)):
        schema = {"properties": {"a": {"type": kind} if kind else True}}
        stream = get("qwen3-coder").stream([{"type": "function", "function": {"name": "f", "parameters": schema}}])
        (call,) = [*stream.feed(text), *stream.close()]
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == {"a": value}
    for parameters in (None, [], {"properties": []}, {"properties": {"a": 5}}):
        stream = get("xml").stream([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
        assert stream.feed("x") == ["x"]


#: a reply of text that only looks as if a call began, which is no fault
INNOCENT = [
    ("python", "[1] says so.\n[a](b) too\n[ ] open"),
    ("command", "@everyone hello\n@me: {ok}\nmail a@b.c"),
    ("command:sign=call,shape=blank", "call me maybe\ncall it {a}"),
    ("fence", '```json\n{"answer": 5}\n```\ndone'),
    ("python:wrap=python", "```python\nimport os\n```"),
    ("react", "Thought: no Action: here"),
    ("hermes", "a < b, <tool_calls>"),
]


@pytest.mark.parametrize(("name", "text"), INNOCENT)
def test_text_is_no_broken_call(name: str, text: str) -> None:
    assert read(get(name), text) == ([text], [])


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name":"f"}</tool_call>', "no arguments"),
        ("hermes", "<tool_call>{", "not closed"),
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", "no </parameter>"),
        ("xml", "<function_calls>\nf(1)\n</function_calls>", "expected <invoke"),
        ("react", "Action: f\nsome text\n", "expected Action Input:"),
        ("python", "[f(1)]", "expected a name"),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>", "expected <|tool_call_begin|>"),
        ("glm-4.5", "<tool_call></tool_call>", "no name"),
    ],
)
def test_a_broken_call_has_a_reason(name: str, text: str, reason: str) -> None:
    pieces, (told,) = read(get(name), text)
    assert pieces == [text]
    assert reason in told


def test_text_flows_at_once_and_calls_when_they_end() -> None:
    for family in FAMILIES:
        stream = family().stream()
        text = family().render("", [CITY])
        assert stream.feed("Let me see") == ["Let me see"], family.family
        assert not any(isinstance(piece, ToolCall) for piece in stream.feed(f".\n{text[:-1]}"))
        assert stream.feed(text[-1:]) == [CITY], family.family
        assert stream.close() == []


def test_ids() -> None:
    assert get("xml:tag=call,quote=single").id == "xml:tag=call,quote=single"
    assert get("xml:wrap=minimax:tool_call") is get("minimax-m2")
    with pytest.raises(ForgeError, match="near: minimax-m2"):
        get("minimax")
    with pytest.raises(ForgeError, match=r"'xml:tag=kall'.*near: xml:tag=call"):
        get("xml:tag=kall")
    assert tool_prompting("template") == (True, get("hermes"))
    assert tool_prompting("template:glm-4.5") == (True, get("glm"))
    assert tool_prompting("react") == (False, get("react"))


def test_protocol() -> None:
    tool_format: ToolFormat = get("hermes")
    assert tool_format.exact


@pytest.mark.parametrize("name", ["json", "fence", "react", "command", "lines", "python"])
def test_in_the_middle_of_a_line_no_block_begins(name: str) -> None:
    """However the text is cut."""
    text = f"so: {get(name).render('', [CITY])}"
    for size in (len(text), 4, 3, 1):
        pieces, reasons = read(get(name), text, [size] * (len(text) // size))
        assert (pieces, reasons) == ([text], []), size


@pytest.mark.parametrize("name", [family.family for family in FAMILIES])
def test_text_after_a_call_keeps_its_space(name: str) -> None:
    text = get(name).render("", [CITY]) + " \n \n more"
    for size in (len(text), 1):
        assert read(get(name), text, [size] * (len(text) // size)) == ([CITY, " \n \n more"], [])
    assert read(get(name), text.removesuffix("more")) == ([CITY], [])
