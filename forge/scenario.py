"""Scenarios: one TOML file per question. The same file drives the simulator and the live system.

Unknown keys, wrong types and impossible values are errors that name the key's path, the value and the way out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from forge.policies import AnyRouter, AnyScheduler, Policies
from forge.processing import AnyBatcher, AnyProcessor, Chain, DropZeroVariance, Survivors
from forge.queue import QueueShape
from forge.types import ForgeError

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]


#: every `kind` of the slots that have more than one
KINDS = {cls().kind for slot in (AnyScheduler, AnyRouter) for cls in get_args(get_args(slot)[0])}


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Stop(Section):
    """When a run ends: at the first of these reached. Items under way then still end, and are trained on."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    steps: Positive | None = None
    items: Positive | None = None

    @model_validator(mode="after")
    def _one(self) -> Stop:
        if self.seconds is None and self.steps is None and self.items is None:
            raise ValueError("give at least one of seconds, steps, items")
        return self

    def reached(self, seconds: float, steps: int, items: int) -> bool:
        """Of a run that has lasted `seconds`, committed `steps` and submitted `items`."""
        return (
            (self.seconds is not None and seconds >= self.seconds)
            or (self.steps is not None and steps >= self.steps)
            or (self.items is not None and items >= self.items)
        )


class Queue(Section):
    """N, P, C and the group size, all in items but the last. An item is one prompt group of `group` members."""

    n: Positive = 32
    batch: Positive = 8
    concurrency: Positive = 16  # items under way at once, C <= N
    group: Positive = 8
    lag_budget: Positive | None = None  # L, items: N + W - 2 <= L; only tuning may start from a larger lag
    item_timeout_s: Annotated[float, Field(gt=0)] = 60.0

    @model_validator(mode="after")
    def _fits(self) -> Queue:
        if self.concurrency > self.n:
            raise ValueError(f"concurrency = {self.concurrency} must not exceed n = {self.n}")
        return self


class ToolWait(Section):
    """Seconds a tool call waits: log-normal body, capped tail. Declared, so that live and simulated agree."""

    median_s: Seconds = 0.0
    sigma: Seconds = 1.0
    cap_s: Seconds = 10.0


class DomainMix(Section):
    """One domain of the mix. Shares hold over any N consecutive submissions."""

    name: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    tool_wait: ToolWait = ToolWait()


class Model(Section):
    """A Hugging Face folder, or the name of one that ships or that `forge model get` made."""

    path: str = "quickstart"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tool_prompt: Literal["template", "hermes"] = "template"


class EngineSection(Section):
    """Rollout instances. `kind` fake is the deterministic engine without torch."""

    kind: Literal["torch", "fake"] = "torch"
    instances: Positive = 1
    slots: Positive = 64
    max_context: Positive = 512
    temperature: Annotated[float, Field(gt=0)] = 1.0


class Train(Section):
    """CISPO and AdamW. The clip is [1 - e_low, 1 + e_high]; e_low = 1 means no lower bound."""

    lr: Annotated[float, Field(ge=0)] = 2e-4
    e_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    e_high: Annotated[float, Field(ge=0)] = 4.0
    normalise: Literal["tokens", "group"] = "tokens"
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    micro_batch_tokens: Positive = 8192
    process: AnyProcessor = Chain(steps=(Survivors(), DropZeroVariance()))
    #: cuts a trainer step's batch into optimiser steps; none: one for the whole batch
    batches: AnyBatcher | None = None
    keep_checkpoints: Positive = 2


class Eval(Section):
    """Held-out tasks scored with greedy decoding before and after a run (0: none)."""

    tasks: Annotated[int, Field(ge=0)] = 0


class SimDomain(Section):
    """Workload of one domain, fitted by `forge calibrate`. Log-normals by median and sigma; tails are capped."""

    turns: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (0.3, 0.4, 0.3)  # P(1, 2, ...)
    prompt_tokens: Positive = 48  # of the first turn
    turn_tokens: Annotated[int, Field(ge=0)] = 16  # a later turn's prompt grows by these beside what was sampled
    tokens_median: Annotated[float, Field(gt=0)] = 12.0  # sampled tokens per turn
    tokens_sigma: Seconds = 0.5
    tokens_cap: Positive = 256
    #: share of the variance of turns, lengths and outcomes that all members of an item have in common: harder items
    #: are longer and pass less often
    item_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    difficulty_mean: float = 3.0
    difficulty_sd: Seconds = 1.0
    death_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of a member
    reward: Annotated[float, Field(ge=0, le=1)] = 0.3

    @model_validator(mode="after")
    def _some_turns(self) -> SimDomain:
        if sum(self.turns) <= 0:
            raise ValueError("turns: at least one probability must be above 0")
        return self


class Sim(Section):
    """The simulator's model of this machine and this work."""

    #: one decode iteration takes step_s + row_s * rows + prefill_token_s * tokens prefilled in it
    step_s: Annotated[float, Field(gt=0)] = 4e-3
    row_s: Seconds = 1e-4
    prefill_token_s: Seconds = 2e-5
    cached_share: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of prompt tokens whose KV is reused
    #: seconds of agent and gateway work around one completion, on one shared core, and its fixed latency
    request_cpu_s: Seconds = 3e-3
    request_latency_s: Seconds = 2e-3
    #: a trainer step takes data_s + train_step_s + train_token_s * tokens; then it saves; an engine loads
    data_s: Seconds = 0.0
    train_step_s: Seconds = 0.05
    train_token_s: Seconds = 1e-4
    save_s: Seconds = 0.02
    load_s: Seconds = 0.01
    instance_mtbf_s: Annotated[float, Field(gt=0)] | None = None
    instance_repair_s: Seconds = 5.0
    domains: dict[str, SimDomain] = {}
    calibrated_from: str | None = None


class Live(Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port


class Scenario(Section):
    """Everything a run needs besides the code. `name` and the opening comment of the file say which question."""

    name: str
    seed: Annotated[int, Field(ge=0)] = 0
    stop: Stop
    queue: Queue = Queue()
    policy: Policies = Field(default_factory=Policies)
    domains: Annotated[tuple[DomainMix, ...], Field(min_length=1)]
    model: Model = Model()
    engine: EngineSection = EngineSection()
    train: Train = Train()
    eval: Eval = Eval()
    sim: Sim = Sim()
    live: Live = Live()

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        self.shape()
        names = [d.name for d in self.domains]
        if len(set(names)) != len(names):
            raise ValueError(f"domains: a name appears twice in {names}")
        if strangers := sorted(set(self.sim.domains) - set(names)):
            raise ValueError(f"sim.domains.{strangers[0]}: no domain of the mix has that name; there are {names}")
        return self

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
                f"queue.lag_budget = {budget}: N + W - 2 = {bound} items of lag are possible; lower queue.n or the "
                f"scheduler's window, or let `forge tune` choose them"
            )

    def shape(self) -> QueueShape:
        """The queue's numbers under this scenario's policies. Raises ForgeError outside the validity condition."""
        return QueueShape(
            n=self.queue.n,
            batch=self.queue.batch,
            window=self.policy.scheduler.window(self.queue.n),
            publish_every=self.policy.sync.publish_every,
        )


def parse(data: dict[str, Any], source: str) -> Scenario:
    """Raises ForgeError with one line per fault: `source: key.path = value: what is wrong`."""
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ForgeError("\n".join(_explain(error, source))) from None


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
    if calibration is not None:
        fitted = read_toml(Path(calibration))
        if set(fitted) != {"sim"}:
            raise ForgeError(f"{calibration}: not a calibration; it must hold one section, [sim]")
        data |= fitted
    if policy is not None:
        tuned = read_toml(Path(policy))
        queue = tuned.pop("queue", {})
        for source, table in ((policy, queue), (path, data.setdefault("queue", {}))):
            if not isinstance(table, dict):
                raise ForgeError(f"{source}: queue = {table!r}: must be a table")
        data["policy"] = tuned
        data["queue"] |= queue
    for setting in sets:
        apply_setting(data, setting)
    scenario = parse(data, str(path))
    if not tuning:
        scenario.check_lag_budget()
    return scenario


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


def apply_setting(data: dict[str, Any], setting: str) -> None:
    """Put `a.b.c=value` into nested tables. The value is TOML; a bare word is a string.

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
    table = data
    for depth, part in enumerate(parts[:-1]):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ForgeError(f"--set {setting}: {'.'.join(parts[: depth + 1])} is not a table")
    of_kinds = parts[0] == "policy" or parts[:2] in (["train", "process"], ["train", "batches"])
    if of_kinds and parts[-1] == "kind" and table.get("kind") != value:
        table.clear()
    table[parts[-1]] = value


def policy_toml(policies: Policies, queue: dict[str, Any] | None = None, comment: str = "") -> str:
    """A `policy.toml`: the slots, and the queue numbers tuned with them."""
    dumped = _configuration(TypeAdapter(Policies).dump_python(policies, mode="json"))
    if queue:
        dumped["queue"] = queue
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


def _explain(error: ValidationError, source: str) -> list[str]:
    lines = []
    for fault in error.errors():
        loc = [str(part) for part in fault["loc"]]
        if len(loc) > 2 and loc[0] == "policy" and loc[2] in KINDS:
            del loc[2]  # pydantic inserts the union's tag, which is no key of the file
        path = ".".join(loc) or "scenario"
        match fault["type"]:
            case "extra_forbidden" | "unexpected_keyword_argument":
                text = f"{path}: unknown key; check its spelling"
            case "missing":
                text = f"{path}: missing; add it"
            case _:
                message = fault["msg"].removeprefix("Value error, ")
                value = fault["input"]
                shown = "" if isinstance(value, dict | BaseModel) else f" = {value!r}"
                text = f"{path}{shown}: {message}"
        lines.append(f"{source}: {text}")
    return lines
