"""What is wrong with a scenario, in words: a line a fault, with the key's path, its value and what may be there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from forge.policies import AnyDispatch, AnyKv, AnyPlacement, AnyRouter, AnyScheduler, AnySpeculation
from forge.processing import AnyBatcher, AnyProcessor

#: tables that have a `kind` to choose, by their key
CHOICES = {
    key: [cls.kind for cls in get_args(get_args(union)[0])]
    for key, union in {
        "scheduler": AnyScheduler,
        "router": AnyRouter,
        "placement": AnyPlacement,
        "speculation": AnySpeculation,
        "kv": AnyKv,
        "dispatch": AnyDispatch,
        "process": AnyProcessor,
        "steps": AnyProcessor,
        "batches": AnyBatcher,
    }.items()
}
SHOWN = 60  # characters of a value


@dataclass(frozen=True, slots=True)
class Fault:
    """`path`: keys of the file. `branch`: of a union of types, where it begins in the path and which type refused."""

    path: tuple[str, ...]
    branch: tuple[int, str] | None
    value: Any
    text: str

    def line(self) -> str:
        """A fault of the whole has no path; its message names the keys."""
        path = ".".join(self.path)
        if not path:
            return self.text
        shown = "" if self.value is None or isinstance(self.value, dict | BaseModel) else f" = {_shown(self.value)}"
        return f"{path}{shown}: {self.text}"


def explain(error: ValidationError, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of every fault of `data` the path and the line."""
    faults = [_fault(fault, data) for fault in error.errors()]
    return [(".".join(fault.path), fault.line()) for fault in _of_unions(faults) if fault.text]


def _fault(fault: Any, data: Mapping[str, Any]) -> Fault:
    kind, value, context = fault["type"], fault["input"], fault.get("ctx", {})
    named = kind in ("missing", "extra_forbidden", "unexpected_keyword_argument")
    path, branch = _keys(fault["loc"], data, named=named)
    choices = CHOICES.get(next((key for key in reversed(path) if not key.isdigit()), ""), ())
    one_of = f"one of {', '.join(map(repr, choices))}"
    text = (
        fault["msg"]
        .removeprefix("Value error, ")
        .replace("Input should be", "must be")
        .partition(", unable to parse")[0]
    )
    match kind:
        case "extra_forbidden" | "unexpected_keyword_argument":
            value, text = None, "unknown key; check its spelling"
        case "missing":
            value, text = None, "missing; add it"
        case "union_tag_not_found":
            path, value, text = (*path, "kind"), None, f"missing; give {one_of}"
        case "union_tag_invalid":
            path, value, text = (*path, "kind"), value["kind"], f"must be {one_of}"
        case "model_attributes_type":
            text = f"must be a table, whose kind is {one_of}"
        case "model_type" | "dataclass_type" | "dict_type":
            text = "must be a table"
        case "tuple_type":
            text = "must be a list, not a table" if isinstance(value, Mapping) else "must be a list"
        case "less_than":
            text = f"must be less than {context['lt']:g}"
        case "value_error":  # of a table; it may begin with the key at fault
            key, _, rest = text.partition(" = ")
            if isinstance(value, Mapping) and key in value and ": " in rest:
                path, value, text = (*path, key), value[key], rest.partition(": ")[2]
        case "too_short":
            least = context["min_length"]
            text = "" if len(value) >= least else f"must have {least} or more elements"  # "": said of its elements
    return Fault(path, branch, value, text)


def _keys(location: Sequence[str | int], data: Any, *, named: bool) -> tuple[tuple[str, ...], tuple[int, str] | None]:
    """What of pydantic's location is in the file, which knows no types of a union. `named`: the last part is a key
    that should be there, or should not."""
    path: list[str] = []
    branch: tuple[int, str] | None = None
    for i, part in enumerate(location):
        if _holds(data, part):
            data = data[part]
        elif not (named and i == len(location) - 1):
            branch = branch or (len(path), str(part))
            continue
        path.append(str(part))
    return tuple(path), branch


def _holds(data: Any, part: str | int) -> bool:
    if isinstance(data, Mapping):
        return part in data
    return isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)


def _of_unions(faults: list[Fault]) -> list[Fault]:
    """One fault of a value that no type of its union takes: that of the type that got furthest into it, or what all
    of them ask for."""
    kept: list[Fault] = []
    seen: set[tuple[str, ...]] = set()
    for fault in faults:
        root = fault.path[: fault.branch[0]] if fault.branch else None
        if root is None:
            kept.append(fault)
            continue
        same = [one for one in faults if one.branch and one.path[: one.branch[0]] == root]
        if len({one.branch for one in same}) == 1:
            kept.append(fault)
        elif root not in seen:
            seen.add(root)
            depth = max(len(one.path) for one in same)
            deepest = [one for one in same if len(one.path) == depth]
            text = ", or ".join(dict.fromkeys(one.text for one in deepest))
            kept.append(Fault(deepest[0].path, None, deepest[0].value, text))
    return kept


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
