"""What may be changed on a page: every field of every policy, read off the registry, and the numbers around them.

A control is a key of a scenario. Values are changes by key; `applied` lays them over a scenario as `--set` does, with
one more rule: a size of 0 takes a table away that need not be there (prefill instances, tiers, a drafting head).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import forge
from forge.policies import Policies
from forge.scenario import Scenario, parse, policy_toml, resolved
from forge.types import ForgeError
from sim.tunable import fields_of, kinds_of

Value = bool | int | float | str | None
Changes = Mapping[str, Value]
Kind = Literal["choice", "whole", "number", "yes_no", "text"]

#: tables that need not be there: the keys whose values must all be 0 for the table to be left out
OPTIONAL = {
    "sim.deployment.prefill": ("instances",),
    "sim.tiers": ("l2_gib", "l3_gib"),
    "sim.speculation": ("acceptance",),
    "sim.signals": ("period_s",),
}

#: keys of such a table that begin with what another key holds
BEGINS_AS = {f"sim.deployment.prefill.{key}": f"sim.deployment.{key}" for key in ("tp", "ep", "dp")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One key. `kind`: of its value; "choice" among `choices`. `low`: least value. `step`: of a click. `optional`: it
    may be None, which a page shows as an empty field."""

    path: str
    label: str
    kind: Kind
    choices: tuple[str, ...] = ()
    default: Value = None
    low: float | None = None
    step: float = 1.0
    optional: bool = False
    help: str = ""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


SLOTS = tuple(one.name for one in fields(Policies))


# --- policies, from their dataclasses ------


@cache
def kind_control(slot: str) -> Control:
    told = "  \n".join(f"**{kind}**: {_first_sentence(one)}" for kind, one in kinds_of(slot).items())
    kinds = tuple(kinds_of(slot))
    return Control(path=f"policy.{slot}.kind", label=slot, kind="choice", choices=kinds, help=told)


@cache
def fields_controls(slot: str, kind: str) -> tuple[Control, ...]:
    """Of the fields of a policy of this kind."""
    policy = kinds_of(slot)[kind]
    hints = get_type_hints(policy)
    defaults = {one.name: one.default for one in fields(policy) if one.default is not MISSING}
    return tuple(_field(f"policy.{slot}.{name}", hints[name], defaults.get(name)) for name in fields_of(policy))


def _field(path: str, hint: Any, default: Any) -> Control:
    inner = [one for one in get_args(hint) if one is not type(None)]
    optional = isinstance(hint, UnionType) and type(None) in get_args(hint)
    if optional and len(inner) == 1:
        hint = inner[0]
    label = path.rpartition(".")[2].replace("_", " ")
    if get_origin(hint) is Literal:
        return Control(path=path, label=label, kind="choice", choices=tuple(map(str, get_args(hint))), default=default)
    kinds: dict[Any, Kind] = {bool: "yes_no", int: "whole", float: "number"}
    kind: Kind = kinds.get(hint, "text")
    step = _step(default) if kind == "number" else 1.0
    return Control(path=path, label=label, kind=kind, default=default, step=step, optional=optional)


def _step(default: Any) -> float:
    """Of a click on a number: a twentieth where it is a share, else a tenth of the default."""
    if not isinstance(default, float) or default == 0.0 or 0.05 <= default <= 1.0:
        return 0.05
    return default / 10


def _first_sentence(policy: type) -> str:
    text = " ".join((policy.__doc__ or "").split())
    return text.partition(". ")[0].rstrip(".") + "."


def slots_for(scenario: Scenario) -> list[str]:
    """All but the scheduler, and those whose policy the scenario gives nothing to decide on."""
    sim = scenario.sim
    idle = {"scheduler"}
    idle |= set() if sim.deployment else {"placement", "speculation"}
    idle |= set() if sim.agents else {"kv"}
    return [slot for slot in SLOTS if slot not in idle]


# --- numbers around them ------


def queue_controls() -> list[Control]:
    return [
        Control(path="queue.n", label="N, generation batch", kind="whole", low=1, help="Items given out ahead."),
        Control(path="queue.concurrency", label="Concurrency", kind="whole", low=1, help="Items under way at once."),
    ]


def fleet_controls(scenario: Scenario) -> list[Control]:
    """The fleet's shape; accelerators' keys only where the scenario has [sim.deployment]."""
    found = [
        Control(path="engine.instances", label="Instances", kind="whole", low=1),
        Control(path="engine.slots", label="Slots an instance", kind="whole", low=1, help="Requests that run at once."),
        Control(
            path="sim.signals.period_s",
            label="Instances report every (s)",
            kind="number",
            low=0.0,
            step=0.5,
            help="0: they report nothing, and routers see what is in flight alone.",
        ),
    ]
    if scenario.sim.deployment is None:
        return found
    return [
        *found,
        Control(path="sim.deployment.hardware", label="Hardware", kind="choice", choices=hardware_names()),
        Control(path="sim.deployment.tp", label="Tensor parallel", kind="whole", low=1),
        Control(path="sim.deployment.ep", label="Expert parallel", kind="whole", low=1),
        Control(path="sim.deployment.dp", label="Replicas in lockstep", kind="whole", low=1),
        Control(
            path="sim.deployment.prefill.instances",
            label="Prefill instances",
            kind="whole",
            low=0,
            help="They compute prompts for the others, which then decode: this over instances is P:D. 0: none.",
        ),
        Control(path="sim.deployment.prefill.tp", label="Their tensor parallel", kind="whole", low=1),
        Control(path="sim.deployment.prefill.ep", label="Their expert parallel", kind="whole", low=1),
        Control(path="sim.tiers.l2_gib", label="L2 KV, host (GiB)", kind="number", low=0.0, step=100.0),
        Control(path="sim.tiers.l3_gib", label="L3 KV, shared (GiB)", kind="number", low=0.0, step=1000.0),
        Control(
            path="sim.speculation.acceptance",
            label="Drafts accepted",
            kind="number",
            low=0.0,
            step=0.05,
            help="By the head that drafts, at the first depth and every other; 0: there is no head.",
        ),
    ]


@cache
def hardware_names() -> tuple[str, ...]:
    return _cards("hardware")


@cache
def model_names() -> tuple[str, ...]:
    return _cards("model_cards")


def _cards(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (Path(forge.__file__).parent / folder).glob("*.toml")))


# --- values ------


def value_of(scenario: Scenario, control: Control) -> Value:
    """What the scenario holds there; of a table that is not there what it would begin with (0: of no size), of a key of
    another kind its default."""
    held = _held(scenario, control.path)
    if held is None and control.path in BEGINS_AS:
        held = _held(scenario, BEGINS_AS[control.path])
    if isinstance(held, tuple):  # acceptance by depth: a page shows the first
        return float(held[0])
    if held is None and not control.optional:
        return control.default if control.default is not None else (1 if control.low == 1 else 0)
    return held if isinstance(held, bool | int | float | str) else None


def _held(scenario: Scenario, path: str) -> Any:
    held: Any = scenario
    for part in path.split("."):
        held = getattr(held, part, None)
    return held


def applied(scenario: Scenario, changes: Changes, source: str) -> Scenario:
    """Raises ForgeError, in a line a fault, where the scenario with the changes is none, or over its lag budget."""
    data = resolved(scenario)
    for path, value in sorted(changes.items(), key=lambda change: not change[0].endswith(".kind")):
        _put(data, path, value)
    if "queue.n" in changes:
        data["queue"]["n_from_lag_budget"] = False
    for table, keys in OPTIONAL.items():
        _leave_out(data, table, keys)
    made = parse(data, source)
    made.check_lag_budget()
    return made


def changed(scenario: Scenario, changes: Changes, controls: list[Control]) -> dict[str, Value]:
    """Those of the changes that change anything, and all of a table that they bring in."""
    by_path = {control.path: control for control in controls}
    new = [
        f"{table}."
        for table, sizes in OPTIONAL.items()
        if _held(scenario, table) is None and any(changes.get(f"{table}.{size}") for size in sizes)
    ]
    return {
        path: value
        for path, value in changes.items()
        if path not in by_path or value != value_of(scenario, by_path[path]) or path.startswith(tuple(new))
    }


def _put(data: dict[str, Any], path: str, value: Value) -> None:
    *tables, key = path.split(".")
    table = data
    for part in tables:
        if table.get(part) is None:
            table[part] = {}
        table = table[part]
    if tables[0] == "policy" and key == "kind" and table.get("kind") != value:
        table.clear()
    table[key] = value


def _leave_out(data: dict[str, Any], path: str, keys: tuple[str, ...]) -> None:
    *tables, name = path.split(".")
    table: Any = data
    for part in tables:
        table = table.get(part) if isinstance(table, dict) else None
    if isinstance(table, dict) and isinstance(held := table.get(name), dict) and not any(held.get(k) for k in keys):
        table[name] = None


def policy_file(scenario: Scenario, changes: Changes, comment: str) -> str:
    """A `policy.toml` of what the page shows: the slots, the queue's numbers, and what of the fleet was changed.

    Raises ForgeError where a file cannot say it: TOML has no word for a table that is to go.
    """
    held: dict[str, Any] = {"queue": {"n": scenario.queue.n, "concurrency": scenario.queue.concurrency}}
    if scenario.queue.n_from_lag_budget or "queue.n" in changes:
        held["queue"]["n_from_lag_budget"] = False
    whole = resolved(scenario)
    for path, value in changes.items():
        table, _, key = path.rpartition(".")
        if path.startswith(("policy.", "queue.")):
            continue
        if table in OPTIONAL and key in OPTIONAL[table] and not value and not _copy(whole, held, path.split(".")):
            if table in ("sim.deployment.prefill", "sim.signals"):
                raise ForgeError(f"[{table}]: a policy file cannot take it away; take it out of the scenario's file")
            _set(held, path.split("."), 0)
        else:
            _copy(whole, held, path.split("."))
    return policy_toml(scenario.policy, held, comment)


def _copy(whole: dict[str, Any], held: dict[str, Any], parts: list[str]) -> bool:
    """What the scenario has at a path; False where there is nothing."""
    source: Any = whole
    for part in parts:
        source = source.get(part) if isinstance(source, dict) else None
    if source is not None:
        _set(held, parts, source)
    return source is not None


def _set(held: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        held = held.setdefault(part, {})
    held[parts[-1]] = value
