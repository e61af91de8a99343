"""Keys of a scenario that tuning may change: every field of a policy, the queue's N and concurrency, the fleet's shape.

Nothing here changes the work, the batch or what a sample teaches: candidates would no longer be compared by seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from forge.policies import Policies
from forge.scenario import Scenario
from forge.sections import EngineSection, Queue, Section
from forge.sections_rollout import Prefill, TierSizes
from forge.sections_sim import Deployed
from forge.types import ForgeError

Value = bool | int | float | str
Point = tuple[tuple[str, Value], ...]  # keys and their values, in the order of the space

#: tables beside the policies', and which of their keys
SECTIONS: dict[str, tuple[type[Section], tuple[str, ...]]] = {
    "queue": (Queue, ("n", "concurrency")),
    "engine": (EngineSection, ("instances", "slots")),
    "sim.deployment": (Deployed, ("hardware", "tp", "ep", "dp", "budget")),
    "sim.deployment.prefill": (Prefill, ("instances", "tp", "ep", "dp")),
    "sim.tiers": (TierSizes, ("l2_gib", "l3_gib")),
}
#: keys that say how many devices there are
FLEET = ("engine.instances", "sim.deployment.")


@cache
def kinds_of(slot: str) -> Mapping[str, type]:
    """The policies that a slot may hold, by kind."""
    hint = get_type_hints(Policies, include_extras=True)[slot]
    union = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return {one.kind: one for one in get_args(union) or (union,)}


@cache
def fields_of(policy: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(policy) if one.init and one.name != "kind")


def applies(path: str, kinds: Mapping[str, str]) -> bool:
    """Whether a key exists where the slots hold these kinds."""
    table, _, key = path.rpartition(".")
    root, _, slot = table.partition(".")
    return root != "policy" or key == "kind" or key in fields_of(kinds_of(slot)[kinds[slot]])


@dataclass(frozen=True, slots=True)
class Key:
    """A key that may be tuned. `number`: int or float where it is one. `owners`: the policies that have it; empty: a
    table beside them."""

    path: str
    number: type | None
    owners: tuple[type, ...]
    adapter: TypeAdapter[Any] | None

    def check(self, value: Value) -> Value:
        """The value as the scenario takes it. Raises ForgeError with the reason where it does not."""
        try:
            checked: Value = value
            if self.adapter is not None:
                checked = self.adapter.validate_python(value)
            name = self.path.rpartition(".")[2]
            for owner in self.owners:
                checked = getattr(TypeAdapter(owner).validate_python({name: value}), name)
            return checked
        except ValidationError as error:
            text = error.errors()[0]["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            key, _, rest = text.partition(": ")
            raise ForgeError(rest if " = " in key else text.partition(", unable")[0]) from None


def find(path: str, scenario: Scenario, kinds: Mapping[str, set[str]]) -> Key:
    """`kinds`: what each slot may hold. Raises ForgeError where there is no such key, with those that there are."""
    table, _, name = path.rpartition(".")
    if table in SECTIONS:
        return _of_section(path, table, name, scenario)
    root, _, slot = table.partition(".")
    slots = [one.name for one in fields(Policies)]
    if root != "policy" or slot not in slots:
        known = [
            *(f"policy.{one}.*" for one in slots),
            *(f"{t}.{k}" for t, (_, keys) in SECTIONS.items() for k in keys),
        ]
        raise ForgeError(f"{path}: not a key that can be tuned; those are {', '.join(known)}; --set changes any other")
    if name == "kind":
        one_of: Any = Literal[tuple(kinds_of(slot))]
        return Key(path, None, (), TypeAdapter(one_of))
    return _of_policy(path, slot, name, kinds[slot])


def _of_section(path: str, table: str, name: str, scenario: Scenario) -> Key:
    section, keys = SECTIONS[table]
    if name not in keys:
        raise ForgeError(f"{path}: not a key that can be tuned; of [{table}] those are {', '.join(keys)}")
    held: Any = scenario
    for part in table.split("."):
        held = getattr(held, part, None)
    if held is None:
        raise ForgeError(f"{path}: the scenario has no [{table}]; add it, or leave the key out of the space")
    field = section.model_fields[name]
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return Key(path, _number(field.annotation), (), TypeAdapter(kind))


def _of_policy(path: str, slot: str, name: str, kinds: set[str]) -> Key:
    classes = kinds_of(slot)
    owners = tuple(classes[kind] for kind in sorted(kinds) if name in fields_of(classes[kind]))
    if not owners:
        having = [kind for kind, one in classes.items() if name in fields_of(one)]
        if having:
            way = f"add policy.{slot}.kind={','.join(having)} to the space, or --set it"
            raise ForgeError(f"{path}: {', '.join(sorted(kinds))} has no such key; {way}")
        there = sorted({f"{kind}.{field}" for kind, one in classes.items() for field in fields_of(one)})
        raise ForgeError(f"{path}: unknown key; check its spelling; by kind there are: kind, {', '.join(there)}")
    hint: Any = get_type_hints(owners[-1])[name]
    return Key(path, _number(hint), owners, None)


def _number(hint: Any) -> type | None:
    return int if hint is int else float if hint is float else None
