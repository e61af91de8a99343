"""A search space as written: in a scenario's [tune], in a file, or one key at a time on the command line.

policy.scheduler.fraction=0.1..0.9         a range, ends included; of whole numbers where the key is one
sim.tiers.l2_gib=10..1000 log              evenly by ratio;  8..64 step 8: on a grid
engine.instances=2,4,8                     choices; in TOML a list, ranges in quotes
policy.router.kind=least_loaded,sglang     kinds of a slot; a key of one kind counts only where that is chosen
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from forge.scenario import Scenario
from forge.types import ForgeError
from sim.space import Choices, Dimension, Space, Span, kinds_held
from sim.tunable import Key, Value, find

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(log|step\s+({_NUMBER}))?\s*")
_HOW = "give a range such as 0.1..0.9 (then log, or step 0.1), or two choices or more such as 2,4,8"

Written = Mapping[str, tuple[str, Any]]  # by key: where it was written, and what


def space_of(written: Written, scenario: Scenario) -> Space:
    """Raises ForgeError for an unknown key, a value that the key does not take, a range that is none."""
    held = kinds_held(scenario)
    kinds = {slot: {kind} for slot, kind in held.items()}
    order = sorted(written, key=lambda path: not path.endswith(".kind"))
    dimensions = []
    for path in order:
        source, value = written[path]
        try:
            key = find(path, scenario, kinds)
        except ForgeError as error:
            raise ForgeError(f"{source}: {error}") from None
        try:
            dimensions.append(dimension := _dimension(key, value))
        except ForgeError as error:
            raise ForgeError(f"{source}: {path} = {value!r}: {error}") from None
        if path.endswith(".kind") and isinstance(dimension, Choices):
            kinds[path.split(".")[1]] = {str(one) for one in dimension.values}
    return Space(tuple(dimensions), held)


def from_table(table: Mapping[str, Any], source: str) -> dict[str, tuple[str, Any]]:
    """The keys of nested tables by their path."""
    return {path: (source, value) for path, value in _leaves(table, "")}


def from_params(params: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """`key.path=values`, as written after --param."""
    written: dict[str, tuple[str, Any]] = {}
    for param in params:
        path, eq, text = param.partition("=")
        path = path.strip()
        if not eq or not path or not text.strip():
            raise ForgeError(f"--param {param}: write key.path=values; {_HOW}")
        if path in written:
            raise ForgeError(f"--param {param}: {path} is given twice; give its values in one")
        written[path] = "--param", text if ".." in text else [_scalar(one) for one in text.split(",")]
    return written


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _scalar(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _dimension(key: Key, value: Any) -> Dimension:
    if isinstance(value, str) and (found := _RANGE.fullmatch(value)):
        return _span(key, found)
    if not isinstance(value, list) or len(value) < 2:
        raise ForgeError(f"not a range of numbers, nor choices; {_HOW}; --set fixes a key at one value")
    checked: list[Value] = []
    for one in value:
        try:
            checked.append(key.check(one))
        except ForgeError as error:
            raise ForgeError(f"{one!r}: {error}") from None
    if len(set(map(repr, checked))) < len(checked):
        raise ForgeError("a choice is given twice")
    return Choices(key.path, tuple(checked))


def _span(key: Key, found: re.Match[str]) -> Span:
    if key.number is None:
        raise ForgeError("not a number, so it has no range; give choices, separated by commas")
    low, high = (_end(key, found[i]) for i in (1, 2))
    if low >= high:
        raise ForgeError("the range's lower end comes first, and is less than the other")
    step = float(found[4]) if found[4] else None
    log = found[3] == "log"
    if log and low <= 0:
        raise ForgeError("a range by ratio (log) begins above 0")
    whole = key.number is int
    if step is not None and (step <= 0 or step > high - low or (whole and step != int(step))):
        raise ForgeError("the step must be above 0, within the range, and whole where the key is")
    if step is not None:  # the grid's last point is the range's end
        high = low + int((high - low) / step + 1e-9) * step
    return Span(key.path, low, high, whole, step, log)


def _end(key: Key, text: str) -> float:
    number = float(text)
    try:
        return float(key.check(int(number) if key.number is int and number == int(number) else number))
    except ForgeError as error:
        raise ForgeError(f"{text}: {error}") from None
