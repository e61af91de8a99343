"""A tokenizer folder's chat template, compiled once: the same text transformers renders, without importing it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forge.types import ForgeError, Json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatError(ValueError):
    """Messages this codec cannot render; the client's to mend."""


class ChatTemplate:
    """Renders messages and tools to the prompt text. A folder may name a second template for calls with tools."""

    def __init__(self, folder: Path) -> None:
        self.config = read_json(folder / "tokenizer_config.json")
        special = read_json(folder / "special_tokens_map.json") | self.config
        self.special = {name: _token_text(special[name]) for name in _SPECIAL if special.get(name)}
        sources = _template_sources(folder, self.config)
        self._sources = sources
        environment = _environment()
        try:
            self._plain = environment.from_string(sources["default"])
            self._tools = environment.from_string(sources.get("tool_use", sources["default"]))
        except jinja2.TemplateSyntaxError as error:
            raise ForgeError(f"chat template of {folder}: line {error.lineno}: {error.message}") from error

    def mentions(self, text: str) -> bool:
        """Whether the template's own text has it."""
        return any(text in source for source in self._sources.values())

    def render(self, messages: Sequence[Json], tools: Sequence[Json], *, goes_on: bool = True) -> str:
        """`goes_on`: up to where the assistant's next turn begins."""
        template = self._tools if tools else self._plain
        try:
            return template.render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=goes_on,
                **self.special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatError(f"the model's chat template refused the messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training masks; here it only has to render its inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Exactly the options, filters and globals that transformers gives a template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    options: Json = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators}
    return json.dumps(value, sort_keys=sort_keys, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _template_sources(folder: Path, config: Json) -> dict[str, str]:
    """Template texts by name; files win over the configuration, as in transformers."""
    declared = config.get("chat_template")
    sources = {"default": declared} if isinstance(declared, str) else {}
    if isinstance(declared, list):
        sources = {entry["name"]: entry["template"] for entry in declared}
    if (folder / "chat_template.jinja").is_file():
        sources["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[extra.stem] = extra.read_text(encoding="utf-8")
    if "default" not in sources:
        raise ForgeError(
            f"tokenizer {folder}: no chat template; add a chat_template.jinja beside tokenizer.json, "
            "or use an instruct model"
        )
    return sources


def read_json(path: Path) -> Json:
    """A JSON object from a file; {} where there is none."""
    if not path.is_file():
        return {}
    value: Json = json.loads(path.read_text(encoding="utf-8"))
    return value


def _token_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])
