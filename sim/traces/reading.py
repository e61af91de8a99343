"""What the readers of traces share: the trace in memory, rows with their line, checked values."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge.types import ForgeError
from sim.sessions import Session


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace read from files (`sim.sessions.Trace`). `block`: tokens; `recorded`: its sessions by `start_s`."""

    block: int
    recorded: tuple[Session, ...]

    def sessions(self) -> Iterator[Session]:
        return iter(self.recorded)


def recorded(path: Path, block: int, sessions: Iterable[Session]) -> Recorded:
    """Sorted by start, the first at 0. Raises ForgeError where there is none."""
    found = sorted(sessions, key=lambda session: session.start_s)
    if not found:
        raise ForgeError(f"{path}: no requests in it; give a trace that holds some")
    return Recorded(block, tuple(found))


@dataclass(frozen=True, slots=True)
class Row:
    """One row or JSON object. `where`: file:line, or file and place in it."""

    where: str
    values: Mapping[str, Any]

    def integer(self, key: str, least: int = 0) -> int:
        value = self.number(key)
        if value != int(value) or value < least:
            raise self.wrong(key, f"must be a whole number, at least {least}")
        return int(value)

    def number(self, key: str) -> float:
        found = self.optional(key)
        if found is None:
            raise self.wrong(key, "a number is needed here")
        return found

    def optional(self, key: str) -> float | None:
        """None where the value is absent or empty."""
        value = self.values.get(key)
        if value is None or value == "":
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or isinstance(value, bool):
            raise self.wrong(key, "must be a finite number")
        return number

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "must be a text that is not empty")
        return value

    def integers(self, key: str) -> list[int]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(type(element) is int for element in value):
            raise self.wrong(key, "must be a list of whole numbers")
        return value

    def wrong(self, key: str, rule: str) -> ForgeError:
        if key not in self.values:
            return ForgeError(f"{self.where}: {key} is missing: {rule}; mend the row or leave it out")
        shown = repr(self.values[key])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return ForgeError(f"{self.where}: {key} = {shown}: {rule}; mend the row or leave it out")


def json_rows(path: Path) -> Iterator[Row]:
    """Rows of a JSON lines file; blank lines are skipped."""
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if line.strip():
            yield json_object(f"{path}:{number}", line)


def csv_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    """Rows of a CSV file with a header. Raises ForgeError where one of `columns` is not in it."""
    lines = text_of(path).splitlines()
    reader = csv.DictReader(lines)
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise ForgeError(f"{path}:1: no column {', '.join(missing)}; the first line must name {', '.join(columns)}")
    for values in reader:
        if None in values or None in values.values():
            raise ForgeError(f"{path}:{reader.line_num}: not as many fields as line 1 names; mend the row")
        yield Row(f"{path}:{reader.line_num}", values)


def json_object(where: str, text: str) -> Row:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ForgeError(f"{where}: not JSON ({error.msg} at column {error.colno}): {text[:40]!r}") from None
    if not isinstance(values, dict):
        raise ForgeError(f"{where}: a JSON object is needed here, not {text[:40]!r}")
    return Row(where, values)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ForgeError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ForgeError(f"{path}: cannot be read: {error.strerror}; give the path of a trace") from None


def positive(name: str, value: float) -> float:
    """An option that must be a finite number above 0."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ForgeError(f"{name} = {value!r}: must be a number above 0")
    return value


def seconds(name: str, value: float) -> float:
    """An option that must be a finite number, 0 or more."""
    if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise ForgeError(f"{name} = {value!r}: must be a number of seconds, 0 or more")
    return value


def block_size(value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ForgeError(f"block = {value!r}: must be a whole number of tokens, at least 1")
    return value
