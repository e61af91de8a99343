"""Checks of a request's fields, for every protocol. Each raises ApiError (400) naming the field at fault.

`at` is the path of the object a field lies in ("messages[2]"), empty for the body itself. An absent field and a null
one are the same: the client left it to the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from forge.gateway.errors import invalid
from forge.types import Json

_NAMES: dict[type, str] = {str: "a string", int: "an integer", bool: "a boolean", list: "a list", dict: "an object"}


def parse_body(body: bytes) -> Json:
    """The JSON object a request consists of."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(None, "We could not parse the JSON body of your request.", "invalid_json") from error
    if not isinstance(data, dict):
        raise invalid(None, f"The body must be a JSON object, not {kind(data)}.", "invalid_json")
    return data


def typed(data: Json, key: str, of: type, at: str = "") -> Any:
    """The field, None if absent or null. A bool is no int, though Python thinks so."""
    value = data.get(key)
    if value is None or (isinstance(value, of) and (of is bool or not isinstance(value, bool))):
        return value
    name = inside(at, key)
    raise invalid(name, f"{name} must be {_NAMES[of]}, not {kind(value)}.")


def required(data: Json, key: str, of: type, at: str = "") -> Any:
    """The field, which must be there."""
    value = typed(data, key, of, at)
    if value is None:
        name = inside(at, key)
        raise invalid(name, f"{name} must be {_NAMES[of]}.")
    return value


def objects(data: Json, key: str, at: str = "") -> Iterator[tuple[str, Json]]:
    """(path, object) of each element of a list of objects."""
    for index, value in enumerate(typed(data, key, list, at) or []):
        path = f"{inside(at, key)}[{index}]"
        yield path, an_object(value, path)


def an_object(value: Any, at: str) -> Json:
    if not isinstance(value, dict):
        raise invalid(at, f"{at} must be an object, not {kind(value)}.")
    return value


def integer(data: Json, key: str, least: int, at: str = "") -> int | None:
    value: int | None = typed(data, key, int, at)
    if value is not None and value < least:
        name = inside(at, key)
        raise invalid(name, f"{name} must be at least {least}, not {value}.")
    return value


def number(data: Json, key: str, low: float, high: float, at: str = "") -> float | None:
    value = data.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        name = inside(at, key)
        raise invalid(name, f"{name} must be a number from {low:g} to {high:g}.")
    return float(value)


def top_p(data: Json, key: str = "top_p", at: str = "") -> float | None:
    """0 means the likeliest token alone; engines want a positive share."""
    value = number(data, key, 0.0, 1.0, at)
    return value if value is None else max(value, 1e-6)


def seed(data: Json, key: str = "seed", at: str = "") -> int | None:
    """Engines take natural numbers; clients send any 64-bit integer."""
    value = typed(data, key, int, at)
    return None if value is None else value & (2**63 - 1)


def stops(data: Json, key: str, at: str = "") -> tuple[str, ...]:
    """Stop strings: one, or a list of at most 16. An empty one would stop everything and is dropped."""
    value = data.get(key)
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed) or len(listed) > 16:
        name = inside(at, key)
        raise invalid(name, f"{name} must be a string or a list of at most 16 strings.")
    return tuple(s for s in listed if s)


def given(data: Json, *keys: str) -> tuple[str, ...]:
    """Those of the keys that ask for something: neither absent nor null, 0, false or empty."""
    return tuple(key for key in keys if data.get(key))


def inside(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def kind(value: Any) -> str:
    return "null" if value is None else _NAMES.get(type(value), "a number")
