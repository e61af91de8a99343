"""Names and arguments where a format is not JSON: what may stand as it is, and what is written in JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from forge.formats.base import CannotCarryError, MalformedError, ToolCall
from forge.formats.json_text import TooDeepError, dump, load
from forge.types import Json

#: of tools and, where they stand outside JSON, of arguments
NAME = re.compile(r"\w[\w.-]*")
#: text: a string as it is, all else as JSON; escaped: the same with XML's entities; json: everything as JSON
Values = Literal["text", "escaped", "json"]

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_CHARACTERS = {entity: character for character, entity in _ENTITIES.items()} | {"&quot;": '"', "&apos;": "'"}
_ENTITY = re.compile("|".join(_CHARACTERS))


def plain_name(name: str, what: str, format_id: str) -> str:
    """The name again. Raises CannotCarryError unless it is letters, digits, `_`, `.`, `-`, the last two not first."""
    if not NAME.fullmatch(name):
        raise CannotCarryError(f"tool format {format_id}: {what} {name!r} is not of letters, digits, _ . - alone")
    return name


def arguments_of(call: ToolCall, format_id: str) -> Json:
    """Raises CannotCarryError for arguments that are no JSON object with numbers a double holds."""
    try:
        value = load(call.arguments)
    except ValueError as error:
        raise CannotCarryError(f"tool format {format_id}: arguments of {call.name!r}: {error}") from None
    if not isinstance(value, dict):
        raise CannotCarryError(f"tool format {format_id}: arguments of {call.name!r} are no JSON object")
    return value


def write_value(value: Any, values: Values, marks: Sequence[str]) -> str:
    """Text that `read_value` reads back, and that holds none of `marks`, which would end it."""
    if values != "json" and isinstance(value, str) and not _needs_json(value, marks):
        text = value
    else:
        text = _without(dump(value), marks)
    return "".join(_ENTITIES.get(character, character) for character in text) if values == "escaped" else text


def read_value(text: str, values: Values, marks: Sequence[str], kind: str | None = None) -> Any:
    """`kind`: the type that the tool's schema names; a string then needs no quotes though it looks like a number.
    Raises MalformedError."""
    if values == "escaped":
        text = _ENTITY.sub(lambda found: _CHARACTERS[found.group()], text)
    try:
        value = load(text)
    except ValueError as error:
        if values == "json" or isinstance(error, TooDeepError):
            raise MalformedError(f"a value: {error}") from None
        return text
    quoted = isinstance(value, str) and _needs_json(value, marks)
    return text if values != "json" and kind == "string" and not quoted else value


def stands(text: str, marks: Sequence[str]) -> bool:
    """Whether text without any quotes ends where it should, and holds nothing but text."""
    return not any(mark in text for mark in marks) and not _CONTROL.search(text)


def _needs_json(text: str, marks: Sequence[str]) -> bool:
    """Whether this string as it is would not stand, or be taken for something else."""
    if not stands(text, marks):
        return True
    try:
        load(text)
    except TooDeepError:
        return True
    except ValueError:
        return False
    return True


def _without(text: str, marks: Sequence[str]) -> str:
    """JSON text without these marks, which stand in its strings only."""
    for mark in marks:
        text = text.replace(mark, "".join(f"\\u{ord(character):04x}" for character in mark))
    return text
