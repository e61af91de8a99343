"""From what a reply must be (a forced call, JSON) to the grammar that an engine decodes under."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from pathlib import Path

from forge.formats import ToolFormat
from forge.formats.json_calls import Hermes
from forge.gateway.chat import HfChatCodec
from forge.gateway.reasoning import CLOSE, OPEN, ReasoningStream
from forge.gateway.request import Constrain, Constraint, Request
from forge.rollout.grammar import Grammars, is_installed
from forge.types import Json

#: Space after a colon or a comma, or none: where more may come, small models never stop to write it.
_JSON_OPTIONS = {"whitespace_flexible": False, "key_separator": ": ?", "item_separator": ", ?"}
_GAP = r"GAP: /[ \n]{1,3}/"


def constrainer(codec: HfChatCodec, model_dir: Path) -> Constrain | None:
    """For an engine that decodes under grammars and serves this model; None without the `grammar` extra."""
    if not is_installed():
        return None
    vocab_size = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    grammars, tokens = Grammars(model_dir, vocab_size), codec.added_tokens

    def constrain(constraint: Constraint, request: Request, prompt_ids: tuple[int, ...]) -> str | None:
        reasoning = codec.reasoning_stream(prompt_ids)
        grammar = grammar_of(constraint, request, codec.tool_format, reasoning, tokens)
        return None if grammar is None or grammars.fault(grammar) else grammar

    return constrain


def grammar_of(
    constraint: Constraint,
    request: Request,
    tool_format: ToolFormat,
    reasoning: ReasoningStream | None,
    tokens: Container[str] = (),
) -> str | None:
    """The grammar, in llguidance's Lark syntax; None where the tool format has none here. `tokens`: texts that were
    added to the model's vocabulary; tags among them are sampled as these tokens.

    Reasoning comes before the answer as freely as ever. A demanded format is that of the content: a reply that calls
    tools instead stays allowed where the request offers any.
    """
    tools = [tool for tool in request.tools if not constraint.tools or tool["function"]["name"] in constraint.tools]
    rules = _calls(tools, tool_format, tokens) if tools and request.calls_allowed else []
    if rules is None or (constraint.calls and not rules):
        return None
    answers = [("(call GAP?)+" if request.parallel_calls else "call")] if rules else []
    if not constraint.calls:
        answers.append("content")
        schema = {"type": "object"} if constraint.schema is None else constraint.schema
        rules.append(f"content: {_json(schema)}")
    start, thought = _reasoning(reasoning, tokens)
    lines = [f"start: {start}({' | '.join(answers)})", *rules, *thought, _GAP]
    return "\n".join(lines) + "\n"


def _reasoning(stream: ReasoningStream | None, tokens: Container[str]) -> tuple[str, list[str]]:
    """How the reply begins, and the rules of that."""
    if stream is None:
        return "", []
    opener = "" if stream.opened else _tag(OPEN, tokens)
    start = "thought " if stream.opened else "thought? "
    if CLOSE in tokens:
        return start, [f"thought: {opener} TEXT? {CLOSE} GAP?", r"TEXT: /(.|\n)+/"]
    return start, [f"thought: {opener} thinking GAP?", r"thinking[lazy]: /(.|\n)*<\/think>/"]


def _calls(tools: Sequence[Json], tool_format: ToolFormat, tokens: Container[str]) -> list[str] | None:
    """Rules of `call`: one of these tools', with arguments that its schema allows. None for a format of another family
    than Hermes, or a tool whose arguments are no object."""
    if not isinstance(tool_format, Hermes) or tool_format.args != "object" or tool_format.nest:
        return None
    name_key, arguments_key = (_literal(json.dumps(key)) for key in tool_format.keys.split("/"))
    opener, closer = (_tag(f"<{end}{tool_format.tag}>", tokens) for end in ("", "/"))
    rules = [f"call: {opener} GAP? ({' | '.join(f'call_{at}' for at in range(len(tools)))}) GAP? {closer}"]
    for at, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or {}
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            return None
        name = _literal(json.dumps(function["name"], ensure_ascii=False))
        members = f'{name_key} GAP? ":" GAP? {name} GAP? "," GAP? {arguments_key} GAP? ":" GAP? arguments_{at}'
        rules.append(f'call_{at}: "{{" GAP? {members} GAP? "}}"')
        rules.append(f"arguments_{at}: {_json({**schema, 'type': 'object'})}")
    return rules


def _json(schema: Json) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _tag(text: str, tokens: Container[str]) -> str:
    return text if text in tokens else _literal(text)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
