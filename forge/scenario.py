"""Scenarios: one TOML file per question. The same file drives the simulator and the live system.

Unknown keys, wrong types and impossible values are errors that name the key's path, the value and the way out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from forge.faults import explain
from forge.policies import Fixed, Parking, Policies
from forge.queue import QueueShape
from forge.sections import Agents, DomainMix, Efficiency, EngineSection, Eval, Live, Model, Queue, Section, Stop, Train
from forge.sections_sim import Sim
from forge.types import ForgeError

#: tables that a policy file may hold beside the slots: what is tuned with them, over the scenario's
BESIDE = ("queue", "engine", "sim")


class Scenario(Section):
    """Everything a run needs besides the code. `name` and the opening comment of the file say which question."""

    name: str
    seed: Annotated[int, Field(ge=0)] = 0
    stop: Stop
    queue: Queue = Queue()
    policy: Policies = Field(default_factory=Policies)
    domains: Annotated[tuple[DomainMix, ...], Field(min_length=1)]
    agents: Agents = Agents()
    model: Model = Model()
    engine: EngineSection = EngineSection()
    train: Train = Train()
    eval: Eval = Eval()
    efficiency: Efficiency = Efficiency()
    sim: Sim = Sim()
    live: Live = Live()
    tune: dict[str, Any] = Field(default_factory=dict)  # the search space of `forge tune` (sim.space_text), unread here

    @field_validator("policy", mode="before")
    @classmethod
    def _of_default_kinds(cls, given: Any) -> Any:
        """A policy's table without a kind is of the slot's default one."""
        if not isinstance(given, Mapping):
            return given
        kinds = {slot: policy.kind for slot, policy in Policies().slots().items()}
        return {
            slot: {"kind": kinds[slot], **table} if slot in kinds and isinstance(table, Mapping) else table
            for slot, table in given.items()
        }

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        if self.queue.n_from_lag_budget:
            object.__setattr__(self, "queue", self.queue.model_copy(update={"n": self._n_under_budget()}))
        self.shape()
        names = [d.name for d in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"domains: a name appears twice in {names}")
        for key, models in (("domains", self.sim.domains), ("agents", self.sim.agents)):
            if strangers := sorted(set(models) - set(names)):
                raise ValueError(f"sim.{key}.{strangers[0]}: no domain of the mix has that name; there are {names}")
        if self.sim.agents and (missing := sorted(set(names) - set(self.sim.agents))):
            raise ValueError(f"sim.agents.{missing[0]}: missing; describe the agents of every domain, or of none")
        for name, agent in self.sim.agents.items():
            if agent.first_prompt() >= self.engine.max_context:
                raise ValueError(
                    f"engine.max_context = {self.engine.max_context}: agents of sim.agents.{name} may begin with a "
                    f"prompt of {agent.first_prompt()} tokens, which leaves no room to answer; raise it, or lower "
                    f"system_tokens or task_tokens.cap of the agents or their sub_agents"
                )
        head, policy = self.sim.speculation, self.policy.speculation
        if head is not None and isinstance(policy, Fixed) and policy.tokens > len(head.by_depth()):
            raise ValueError(
                f"policy.speculation.tokens = {policy.tokens}: sim.speculation says how {len(head.by_depth())} are "
                f"accepted; lower it, or give acceptance (most) for more"
            )
        return self

    def _n_under_budget(self) -> int:
        """The largest N whose lag bound is within the budget. Raises ForgeError where the scheduler fixes none."""
        scheduler, budget = self.policy.scheduler, self.queue.lag_budget or 0
        reach = scheduler.park_reach if isinstance(scheduler, Parking) and scheduler.park_items else 0
        if scheduler.kind in ("fffo", "adaptive_window"):
            raise ForgeError(
                f"queue.n_from_lag_budget = True: {scheduler.kind} has no window that follows from N; give queue.n"
            )
        n = max(n for n in range(1, budget + 2) if n + (scheduler.window(n) or n) - 2 + reach <= budget or n == 1)
        if self.queue.concurrency > n:
            raise ForgeError(
                f"queue.concurrency = {self.queue.concurrency}: must not exceed n = {n}, the largest under "
                f"queue.lag_budget = {budget}"
            )
        return n

    def check_lag_budget(self) -> None:
        """Raises ForgeError where the policies allow more lag than `queue.lag_budget`."""
        budget, bound = self.queue.lag_budget, self.shape().lag_items_bound
        if budget is None:
            return
        if bound is None:
            kind = self.policy.scheduler.kind
            raise ForgeError(f"queue.lag_budget = {budget}: {kind} has no window, so no bound; leave the budget out")
        if bound > budget:
            raise ForgeError(
                f"queue.lag_budget = {budget}: N + W - 2{self._reach()} = {bound} items of lag are possible; lower "
                f"queue.n or the scheduler's window, or let `forge tune` choose them"
            )

    def _reach(self) -> str:
        return " + park_reach" if self.shape().park_items else ""

    def mix(self) -> dict[str, float]:
        """The domains' weights."""
        return {one.name: one.weight for one in self.domains}

    def shape(self) -> QueueShape:
        """The queue's numbers under this scenario's policies. Raises ForgeError outside the validity condition."""
        scheduler = self.policy.scheduler
        escape = scheduler if isinstance(scheduler, Parking) else None
        return QueueShape(
            n=self.queue.n,
            batch=self.queue.batch,
            window=scheduler.window(self.queue.n),
            publish_every=self.policy.sync.publish_every,
            park_items=escape.park_items if escape else 0,
            park_reach=escape.park_reach if escape else 0,
        )


def parse(data: dict[str, Any], source: str, owners: Mapping[str, str] | None = None) -> Scenario:
    """Raises ForgeError with one line per fault: `source: key.path = value: what is wrong`.

    `owners` names the source of the keys at and under a path where it is another than `source`; the longest path
    counts.
    """
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        lines = (f"{_owner(path, owners or {}, source)}: {line}" for path, line in explain(error, data))
        raise ForgeError("\n".join(lines)) from None


def load(
    path: str | Path,
    sets: Sequence[str] = (),
    policy: str | Path | None = None,
    calibration: str | Path | None = None,
    *,
    tuning: bool = False,
) -> Scenario:
    """Read a scenario file (or the name of one that ships), and put over it, in this order: the [sim] section of a
    calibration file, a policy file, `key=value` settings.

    `tuning`: the lag budget is what is to be reached, so it may still be exceeded.
    """
    data = read_toml(find(path))
    owners: dict[str, str] = {}
    if calibration is not None:
        fitted = read_toml(Path(calibration))
        if set(fitted) != {"sim"}:
            raise ForgeError(f"{calibration}: not a calibration; it must hold one section, [sim]")
        data |= fitted
        owners["sim"] = str(calibration)
    if policy is not None:
        tuned = read_toml(Path(policy))
        for key in (table for table in BESIDE if table in tuned):
            _lay_over(data, key, tuned.pop(key), (str(path), str(policy)), owners)
        data["policy"] = tuned
        owners["policy"] = str(policy)
    for setting in sets:
        owners[apply_setting(data, setting)] = f"--set {setting}"
    scenario = parse(data, str(path), owners)
    if not tuning:
        scenario.check_lag_budget()
    return scenario


def _lay_over(
    data: dict[str, Any], key: str, value: Any, sources: tuple[str, str], owners: dict[str, str], prefix: str = ""
) -> None:
    """Put `value` at `key`, table by table; `sources`: of the scenario and of what is laid over it."""
    path = f"{prefix}{key}"
    if prefix and not isinstance(value, dict):
        data[key] = value
        owners[path] = sources[1]
        return
    for source, table in ((sources[1], value), (sources[0], data.setdefault(key, {}))):
        if not isinstance(table, dict):
            raise ForgeError(f"{source}: {path} = {table!r}: must be a table")
    for inner, one in value.items():
        _lay_over(data[key], inner, one, sources, owners, f"{path}.")


def find(path: str | Path) -> Path:
    """A file, or the bare name of a scenario that ships."""
    given = Path(path)
    if given.is_file():
        return given
    folder = scenarios_dir()
    shipped = folder / f"{given.name.removesuffix('.toml')}.toml"
    if given.parent == Path() and shipped.is_file():
        return shipped
    known = ", ".join(sorted(p.stem for p in folder.glob("*.toml"))) or "none"
    raise ForgeError(f"{path}: no such scenario file; scenarios that ship: {known}")


def scenarios_dir() -> Path:
    """Of an installed package; in a checkout a link to the folder at its root."""
    return Path(str(resources.files("forge"))) / "scenarios"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ForgeError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ForgeError(f"{path}: is a folder, not a TOML file") from None
    except UnicodeDecodeError:
        raise ForgeError(f"{path}: not a text file") from None
    except OSError as error:
        raise ForgeError(f"{path}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ForgeError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ForgeError(f"{path}: nested too deeply") from None


def apply_setting(data: dict[str, Any], setting: str) -> str:
    """Put `a.b.c=value` into nested tables and return the key's path. The value is TOML; a bare word is a string.

    Changing the `kind` of a policy or a processor drops the old kind's other keys, which the new one would not know.
    """
    key, eq, text = setting.partition("=")
    parts = key.strip().split(".")
    if not eq or not all(parts):
        raise ForgeError(f"--set {setting}: write key.path=value, for example policy.scheduler.fraction=0.5")
    try:
        value = tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except RecursionError:
        raise ForgeError(f"--set {key}: the value is nested too deeply") from None
    table = data
    for depth, part in enumerate(parts[:-1]):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ForgeError(f"--set {setting}: {'.'.join(parts[: depth + 1])} is not a table")
    of_kinds = parts[0] == "policy" or parts[:2] in (["train", "process"], ["train", "batches"])
    if of_kinds and parts[-1] == "kind" and table.get("kind") != value:
        table.clear()
    table[parts[-1]] = value
    return ".".join(parts)


def policy_toml(policies: Policies, beside: dict[str, Any] | None = None, comment: str = "") -> str:
    """A `policy.toml`: the slots, and the tables tuned with them (`BESIDE`)."""
    given = TypeAdapter(Policies).dump_python(policies, mode="json", exclude_none=True)  # TOML has no null
    dumped = _configuration(given) | (beside or {})
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + tomli_w.dumps(dumped)


def resolved(scenario: Scenario) -> dict[str, Any]:
    """Every value spelled out, JSON-serialisable; `parse` reads it back to an equal scenario."""
    dumped = scenario.model_dump(mode="json")
    dumped["policy"] = _configuration(dumped["policy"])
    return dumped


def _configuration(slots: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Without what policies keep for themselves while they run, which no file may hold."""
    return {slot: {k: v for k, v in keys.items() if not k.startswith("_")} for slot, keys in slots.items()}


def _owner(path: str, owners: Mapping[str, str], source: str) -> str:
    over = [key for key in owners if f"{path}.".startswith(f"{key}.")]
    return owners[max(over, key=len)] if over else source
