"""JSON values as Python literals, and calls of functions with such arguments: written, and read without `eval`."""

from __future__ import annotations

import re
from typing import Any, Literal

from forge.formats.base import MalformedError
from forge.formats.json_text import TooDeepError, dump

Quote = Literal["single", "double"]
#: of lists and dicts within each other, when reading
DEEPEST = 100

_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_STRING = re.compile(r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_SPACE = re.compile(r"\s*")
_ONE_LETTER = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CONSTANTS = {"None": None, "True": True, "False": False, "null": None, "true": True, "false": False}


def write(value: Any, quote: Quote, deep: int = 0) -> str:
    """Raises TooDeepError."""
    if deep > DEEPEST:
        raise TooDeepError("nested too deeply")
    if isinstance(value, str):
        return _string(value, quote)
    if isinstance(value, list):
        return f"[{', '.join(write(one, quote, deep + 1) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_string(k, quote)}: {write(one, quote, deep + 1)}' for k, one in value.items())}}}"
    return repr(value)


def _string(value: str, quote: Quote) -> str:
    """JSON's string is Python's too; between apostrophes other characters are escaped."""
    text = dump(value)
    if quote == "double":
        return text
    return "'" + text[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"


class Reader:
    """Reads calls from the front of a text. Everything raises MalformedError for what does not fit."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    @property
    def ended(self) -> bool:
        self._skip()
        return self._at == len(self._text)

    def takes(self, mark: str) -> bool:
        """Whether this comes next; then it is taken."""
        self._skip()
        found = self._text.startswith(mark, self._at)
        self._at += len(mark) if found else 0
        return found

    def needs(self, mark: str) -> None:
        if not self.takes(mark):
            raise MalformedError(f"expected {mark}")

    def name(self) -> str:
        return self._match(_NAME, "a name")

    def arguments(self) -> dict[str, Any]:
        """Up to and with the closing parenthesis; the opening one is taken already."""
        found: dict[str, Any] = {}
        while not self.takes(")"):
            if self.takes("**"):
                more = self.value()
                if not isinstance(more, dict):
                    raise MalformedError("** needs a dict")
                found |= more
            else:
                key = self.name()
                self.needs("=")
                found[key] = self.value()
            if not self.takes(","):
                self.needs(")")
                break
        return found

    def value(self, deep: int = 0) -> Any:
        if deep > DEEPEST:
            raise MalformedError("nested too deeply")
        if self.takes("["):
            return self._list(deep)
        if self.takes("{"):
            return self._dict(deep)
        self._skip()
        first = self._text[self._at : self._at + 1]
        if first and first in "'\"":
            return self._strings()
        if first and first in "+-.0123456789":
            return self._number()
        name = self._match(_NAME, "a value")
        if name not in _CONSTANTS:
            raise MalformedError(f"{name} is no value")
        return _CONSTANTS[name]

    def _list(self, deep: int) -> list[Any]:
        found: list[Any] = []
        while not self.takes("]"):
            found.append(self.value(deep + 1))
            if not self.takes(","):
                self.needs("]")
                break
        return found

    def _dict(self, deep: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.takes("}"):
            key = self.value(deep + 1)
            if not isinstance(key, str):
                raise MalformedError("a key is no string")
            self.needs(":")
            found[key] = self.value(deep + 1)
            if not self.takes(","):
                self.needs("}")
                break
        return found

    def _strings(self) -> str:
        """Adjacent strings are one."""
        parts: list[str] = []
        while self._text[self._at : self._at + 1] in ("'", '"'):
            parts.append(_ESCAPE.sub(_unescaped, self._match(_STRING, "a string")[1:-1]))
            self._skip()
        return "".join(parts)

    def _number(self) -> int | float:
        text = self._match(_NUMBER, "a number")
        try:
            value: int | float = int(text) if re.fullmatch(r"[+-]?[\d_]+", text) else float(text)
        except ValueError:
            raise MalformedError("a number that is none") from None
        if value in (float("inf"), float("-inf")):
            raise MalformedError("a number beyond a double's range")
        return value

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self._skip()
        found = pattern.match(self._text, self._at)
        if not found:
            raise MalformedError(f"expected {what}")
        self._at = found.end()
        return found.group()

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at


def _unescaped(found: re.Match[str]) -> str:
    two, four, eight, octal, other = found.groups()
    code = two or four or eight
    if code or octal:
        number = int(code, 16) if code else int(octal, 8)
        return chr(number) if number <= 0x10FFFF else "\ufffd"
    return _ONE_LETTER.get(other, other if other in "\\'\"" else "\\" + other)


def is_name(text: str) -> bool:
    """Whether these are identifiers with dots between."""
    return bool(_NAME.fullmatch(text)) and all(map(str.isidentifier, text.split(".")))
