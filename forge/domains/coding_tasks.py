"""The problems of `coding`: functions to repair or to write, and configuration files to change, drawn by a generator.

Every number, name and setting is drawn, so there are millions of them. What a judge needs (inputs and what the right
function makes of them, or the settings a file must have) is computed here, from our own sources.
"""

from __future__ import annotations

import configparser
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from forge.domains.splits import Draft

_NOUNS = ("orders", "readings", "scores", "prices", "samples", "visits", "tickets", "weights", "delays", "ratings")
_HIDDEN = 12  # inputs that only the judge has


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A kind of function with its numbers drawn. `bugs` are (right, wrong) pieces of the body."""

    verb: str
    parameter: str
    says: str
    body: tuple[str, ...]
    bugs: tuple[tuple[str, str], ...]
    sample: Callable[[Random], Any]


def _numbers(rng: Random) -> list[int]:
    return [rng.randint(-50, 50) for _ in range(rng.randint(4, 9))]


def _letters(rng: Random) -> str:
    return "".join(rng.choices("aabbcdexyz", k=rng.randint(5, 12)))


def _clipped(rng: Random) -> Piece:
    low, high = rng.randint(-30, 0), rng.randint(1, 30)
    return Piece(
        verb="sum",
        parameter="values",
        says=f"Return the sum of values, where each counts as at least {low} and at most {high}.",
        body=(f"return sum(min(max(value, {low}), {high}) for value in values)",),
        bugs=(("min(max(", "max(max("), (f", {high})", f", {high + 1})"), (f"(value, {low})", f"(value, {low - 1})")),
        sample=_numbers,
    )


def _between(rng: Random) -> Piece:
    low = rng.randint(-30, 10)
    high = low + rng.randint(5, 30)
    return Piece(
        verb="count",
        parameter="values",
        says=f"Return how many of the values are at least {low} and less than {high}.",
        body=(f"return len([value for value in values if {low} <= value < {high}])",),
        bugs=((f"{low} <= value", f"{low + 3} <= value"), (f"< {high}]", f"< {high - 3}]"), ("len(", "sum(")),
        sample=_numbers,
    )


def _every(rng: Random) -> Piece:
    step, first = rng.randint(2, 4), rng.randint(0, 3)
    return Piece(
        verb="pick",
        parameter="values",
        says=f"Return a list of every {step}th value, beginning with the one at index {first}.",
        body=(f"return list(values[{first}::{step}])",),
        bugs=((f"[{first}:", f"[{first + 1}:"), (f":{step}]", f":{step + 1}]"), (f"::{step}", f":{step}")),
        sample=_numbers,
    )


def _rotated(rng: Random) -> Piece:
    places = rng.randint(1, 9)
    return Piece(
        verb="rotate",
        parameter="values",
        says=f"Return a list of the values moved {places} places to the left; what falls out comes in on the right.",
        body=(f"places = {places} % len(values)", "return list(values[places:]) + list(values[:places])"),
        bugs=(
            (f"{places} %", f"-{places} %"),
            ("values[:places]", "values[:places - 1]"),
            ("places:]", "places + 1:]"),
        ),
        sample=_numbers,
    )


def _polynomial(rng: Random) -> Piece:
    third, second, first = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    return Piece(
        verb="weigh",
        parameter="x",
        says=f"Return {third} x^2 + {second} x - {first}.",
        body=(f"return {third} * x**2 + {second} * x - {first}",),
        bugs=(("x**2", "x**3"), (f"{second} * x", f"{second + 1} * x"), (f"- {first}", f"+ {first}")),
        sample=lambda rng: rng.randint(-20, 20),
    )


def _shifted(rng: Random) -> Piece:
    places = rng.choice([*range(1, 13), *range(14, 26)])  # 13 places back are 13 places on
    return Piece(
        verb="encode",
        parameter="text",
        says=f"Return text with each letter a to z moved {places} places on in the alphabet, z being followed by a.",
        body=(f'return "".join(chr((ord(letter) - 97 + {places}) % 26 + 97) for letter in text)',),
        bugs=(("% 26", "% 25"), (f"+ {places}", f"- {places}"), ("26 + 97", "26 + 65")),
        sample=_letters,
    )


def _runs(rng: Random) -> Piece:
    least = rng.randint(1, 2)
    return Piece(
        verb="group",
        parameter="text",
        says=f"Return [letter, length] of each run of equal letters in text that is at least {least} long, in order.",
        body=(
            "runs = []",
            "for letter in text:",
            "    if runs and runs[-1][0] == letter:",
            "        runs[-1][1] += 1",
            "    else:",
            "        runs.append([letter, 1])",
            f"return [run for run in runs if run[1] >= {least}]",
        ),
        bugs=(("runs[-1][0]", "runs[0][0]"), ("[letter, 1]", "[letter, 0]"), (f">= {least}", f"> {least}")),
        sample=_letters,
    )


def _windows(rng: Random) -> Piece:
    width = rng.randint(2, 4)
    best = rng.choice(("max", "min"))
    return Piece(
        verb="smooth",
        parameter="values",
        says=f"Return a list of the {best}imum of every {width} neighbouring values.",
        body=(f"return [{best}(values[at : at + {width}]) for at in range(len(values) - {width - 1})]",),
        bugs=((f"- {width - 1}", f"- {width}"), (f"at + {width}]", f"at + {width - 1}]"), (f"[{best}(", "[sum(")),
        sample=_numbers,
    )


def _digits(rng: Random) -> Piece:
    base = rng.randint(3, 9)
    return Piece(
        verb="spell",
        parameter="number",
        says=f"Return the digits of number (0 or more) in base {base} as a list, the most significant first.",
        body=(
            f"digits = [number % {base}]",
            f"while number >= {base}:",
            f"    number //= {base}",
            f"    digits.append(number % {base})",
            "return digits[::-1]",
        ),
        bugs=((f"= [number % {base}]", "= [number % 2]"), ("digits[::-1]", "digits"), (">=", ">")),
        sample=lambda rng: rng.choice((base, base * base, rng.randint(0, 5000))),
    )


PIECES = (_clipped, _between, _every, _rotated, _polynomial, _shifted, _runs, _windows, _digits)


def function_of(source: str, name: str) -> Callable[[Any], Any]:
    """A function of one of the sources made here."""
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    found: Callable[[Any], Any] = namespace[name]
    return found


def draft_function(rng: Random) -> Draft:
    """Half of them to be repaired, half to be written."""
    piece, noun = rng.choice(PIECES)(rng), rng.choice(_NOUNS)
    name = f"{piece.verb}_{noun}"
    fix = rng.random() < 0.5
    old = new = ""
    head = f"def {name}({piece.parameter}):"
    right_body = "\n".join(f"    {line}" for line in piece.body) + "\n"
    if fix:
        new, old = rng.choice(piece.bugs)
        given_body = right_body.replace(new, old, 1)
    else:
        given_body = "    raise NotImplementedError\n"
    right = function_of(f"{head}\n{right_body}", name)
    inputs = _telling(rng, piece, right, function_of(f"{head}\n{given_body}", name))
    shown = "".join(f"\n\n    >>> {name}({value!r})\n    {right(value)!r}" for value in inputs[:2])
    opening = f'{head}\n    """{piece.says}{shown}\n    """\n'
    path = f"{noun}.py"
    asked = "does not do what its docstring says; repair it" if fix else "is missing; write it as its docstring says"
    return Draft(
        problem=f"{'fix' if fix else 'write'} {opening}{given_body}",
        prompt=f"The function {name} in {path} {asked}. Only {path} is judged, on other inputs.",
        difficulty=2.0 if fix else 3.0,
        data={
            "kind": "fix" if fix else "write",
            "path": path,
            "files": {path: opening + given_body},
            "solution": opening + right_body,
            "judge": {"function": name, "inputs": inputs[2:]},
            "expected": [{"value": right(value)} for value in inputs[2:]],
        },
    )


def _telling(rng: Random, piece: Piece, right: Callable[[Any], Any], given: Callable[[Any], Any]) -> list[Any]:
    """Inputs of which the first two, which are shown, and the others each tell the given function from the right."""
    while True:
        inputs = [piece.sample(rng) for _ in range(2 + _HIDDEN)]
        if all(any(_differs(right, given, value) for value in some) for some in (inputs[:2], inputs[2:])):
            return inputs


def _differs(right: Callable[[Any], Any], given: Callable[[Any], Any], value: Any) -> bool:
    try:
        return bool(given(value) != right(value))
    except Exception:  # the bug, or nothing written yet
        return True


_SECTIONS = ("server", "cache", "logging", "limits", "storage", "worker", "retry", "billing")
_KEYS: Mapping[str, tuple[Any, ...]] = {
    "timeout": tuple(range(5, 95, 5)),
    "port": tuple(range(8000, 8100)),
    "level": ("debug", "info", "warning", "error"),
    "region": ("north", "south", "east", "west"),
    "retries": tuple(range(10)),
    "enabled": ("on", "off"),
    "size": tuple(range(16, 512, 16)),
}


def draft_config(rng: Random) -> Draft:
    """Two or three settings of a file to change, and nothing else of it."""
    format_ = rng.choice(("json", "ini"))
    before: dict[str, dict[str, Any]] = {
        section: {key: rng.choice(_KEYS[key]) for key in rng.sample(sorted(_KEYS), rng.randint(2, 5))}
        for section in rng.sample(_SECTIONS, rng.randint(3, 5))
    }
    places = [(section, key) for section, keys in before.items() for key in keys]
    changes = rng.sample(places, rng.randint(2, 3))
    after = {section: dict(keys) for section, keys in before.items()}
    for section, key in changes:
        after[section][key] = rng.choice([value for value in _KEYS[key] if value != before[section][key]])
    path = f"{rng.choice(_NOUNS)}.{format_}"
    asked = "; ".join(f"{key} of {section} to {after[section][key]}" for section, key in changes)
    return Draft(
        problem=f"config {path} {json.dumps(before)} {asked}",
        prompt=f"Change these settings in {path} and leave all others as they are: {asked}. Only {path} is judged.",
        difficulty=float(len(changes) - 1),
        data={
            "kind": "config",
            "path": path,
            "files": {path: _render(before, format_)},
            "solution": _render(after, format_),
            "judge": {"format": format_},
            "expected": after
            if format_ == "json"
            else {s: {k: str(v) for k, v in e.items()} for s, e in after.items()},
        },
    )


def _render(settings: dict[str, dict[str, Any]], format_: str) -> str:
    if format_ == "json":
        return json.dumps(settings, indent=2) + "\n"
    parser = configparser.ConfigParser()
    parser.read_dict(settings)
    text = io.StringIO()
    parser.write(text)
    return text.getvalue()


def draft(rng: Random) -> Draft:
    """Functions two times of three, files else."""
    return draft_function(rng) if rng.random() < 2 / 3 else draft_config(rng)
