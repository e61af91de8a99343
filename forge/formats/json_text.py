"""Strict JSON with its exact text at hand. Everything here raises ValueError, and only that, for what is not JSON."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

_SPACE = re.compile(r"[ \t\n\r]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


class TooDeepError(ValueError):
    """It may be JSON, but Python will not read it."""


def dump(value: object) -> str:
    """One line. Half a surrogate pair, which no encoded text can hold, is escaped. Raises TooDeepError."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise TooDeepError("nested too deeply") from None
    return _SURROGATE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def load(text: str) -> Any:
    """The value of a whole text, every number of it within a double's range."""
    try:
        return _VALUES.decode(text)
    except RecursionError:
        raise TooDeepError("nested too deeply") from None


def raw(text: str, at: int) -> tuple[object, int]:
    """The value that begins at `at`, and where it ends."""
    try:
        return _TEXTS.raw_decode(text, at)
    except RecursionError:
        raise TooDeepError("nested too deeply") from None


def members(text: str) -> dict[str, tuple[object, str]]:
    """Members of an object as (value, its exact text); the last of a repeated one counts."""
    found: dict[str, tuple[object, str]] = {}
    at = _expect(text, 0, "{")
    while True:
        key, end = raw(text, at)
        if not isinstance(key, str):
            raise ValueError("a member needs a name")
        start = _expect(text, end, ":")
        value, end = raw(text, start)
        found[key] = (value, text[start:end])
        after = skip_space(text, end)
        if text[after : after + 1] != ",":
            break
        at = _expect(text, after, ",")
    if _expect(text, after, "}") != len(text):
        raise ValueError("text after the object")
    return found


def object_text(text: str) -> str:
    """The text again, which must be that of an object, with nothing but space around it."""
    value, end = raw(text, skip_space(text, 0))
    if not isinstance(value, dict) or skip_space(text, end) != len(text):
        raise ValueError("the arguments are no JSON object")
    return text


def elements(text: str) -> list[str]:
    """Exact texts of a list's elements, of which there is at least one."""
    found: list[str] = []
    at = _expect(text, 0, "[")
    while True:
        _, end = raw(text, at)
        found.append(text[at:end])
        after = skip_space(text, end)
        if text[after : after + 1] != ",":
            break
        at = _expect(text, after, ",")
    if _expect(text, after, "]") != len(text):
        raise ValueError("text after the list")
    return found


def skip_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _expect(text: str, at: int, mark: str) -> int:
    """Index of the first non-space after `mark`, which must come next."""
    at = skip_space(text, at)
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark}")
    return skip_space(text, at + 1)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is beyond a double's range")
    return value


#: for values that are written anew, and for those that keep their text
_VALUES = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
_TEXTS = json.JSONDecoder(parse_constant=_no_constant)
