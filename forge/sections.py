"""Sections of a scenario: one frozen pydantic model per TOML table. Unknown keys, wrong types and NaN are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from forge.formats import tool_prompting
from forge.processing import AnyBatcher, AnyProcessor, Chain, DropZeroVariance, Survivors
from forge.scaffolds import DEFAULT, get, select
from forge.types import LONGEST_S

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, lt=LONGEST_S)]
SomeSeconds = Annotated[float, Field(gt=0, lt=LONGEST_S)]
Range = tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(ge=0)]]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Stop(Section):
    """When a run ends: at the first of these reached. Items under way then still end, and are trained on."""

    seconds: SomeSeconds | None = None
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
    #: N = L - W + 2, the largest N that the lag budget allows this scheduler; `n` then says nothing
    n_from_lag_budget: bool = False
    item_timeout_s: SomeSeconds = 60.0

    @model_validator(mode="after")
    def _fits(self) -> Queue:
        if self.n_from_lag_budget and self.lag_budget is None:
            raise ValueError("n_from_lag_budget = True: needs lag_budget; add it")
        if self.concurrency > self.n and not self.n_from_lag_budget:
            raise ValueError(f"concurrency = {self.concurrency} must not exceed n = {self.n}")
        return self


class ToolWait(Section):
    """Seconds a tool call waits: log-normal body, capped tail. Declared, so that live and simulated agree."""

    median_s: Seconds = 0.0
    sigma: NotNegative = 1.0
    cap_s: Seconds = 10.0


class DomainMix(Section):
    """One domain of the mix. Shares hold over any N consecutive submissions."""

    name: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    tool_wait: ToolWait = ToolWait()
    #: a recipe of scenarios/blackbox/ or of yours: live, its program does the tasks; else Forge's own loop
    agent: str | None = None


class Agents(Section):
    """`scaffolds` in which items are played: ids of `forge scaffolds`, or a table of ids with weights. Each item draws
    one for all its members, so that they are compared like with like."""

    scaffolds: Annotated[dict[str, Annotated[float, Field(gt=0)]], Field(min_length=1)] = {DEFAULT: 1.0}

    @field_validator("scaffolds", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        """A list weighs all of them alike; it may hold patterns, as `forge eval --scaffolds` does."""
        if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            return dict.fromkeys(select(value), 1.0)
        return value

    @field_validator("scaffolds")
    @classmethod
    def _known(cls, value: dict[str, float]) -> dict[str, float]:
        return {get(name).id: weight for name, weight in value.items()}


class Model(Section):
    """A Hugging Face folder, or the name of one that ships or that `forge model get` made."""

    path: str = "quickstart"
    dtype: Literal["float32", "bfloat16"] = "float32"
    tool_prompt: str = "template"  # or a format's id, which `forge formats` lists

    @field_validator("tool_prompt")
    @classmethod
    def _known(cls, value: str) -> str:
        tool_prompting(value)
        return value


class Vllm(Section):
    """Servers of vLLM, one an instance, for `engine.kind = "vllm"`; `forge engine install vllm` makes the environment.

    `gpus` of an instance: its tensor parallelism; 0: vLLM's CPU build. With `hosts` the instances are spread over them
    evenly, in order, started by ssh; environment, model and run folder then lie on a file system that all share.
    """

    environment: str = "engines/vllm"  # folder of its Python environment
    dtype: Literal["model", "float32", "bfloat16"] = "model"  # model: as model.dtype says
    gpus: Annotated[int, Field(ge=0)] = 0
    first_gpu: Annotated[int, Field(ge=0)] = 0  # of every host; those below it are the trainer's, say
    hosts: tuple[str, ...] = ()
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the first instance, the next has the next; 0: any free ports
    kv_gib: Positive = 1  # of a CPU instance's KV cache; the share of a GPU's memory goes into args
    args: tuple[str, ...] = ()  # more of the server's own arguments
    start_timeout_s: SomeSeconds = 600.0


class EngineSection(Section):
    """Rollout instances. `kind` fake is the deterministic engine without torch."""

    kind: Literal["torch", "fake", "vllm"] = "torch"
    instances: Positive = 1
    slots: Positive = 64
    max_context: Positive = 512
    temperature: Annotated[float, Field(gt=0)] = 1.0
    vllm: Vllm = Vllm()

    @model_validator(mode="after")
    def _ports(self) -> EngineSection:
        if self.kind == "vllm" and self.vllm.hosts and self.vllm.port == 0:
            raise ValueError("vllm.port = 0: servers on other hosts need ports that are known; give the first one")
        return self


class Train(Section):
    """CISPO and AdamW. The clip is [1 - e_low, 1 + e_high]; e_low = 1 means no lower bound."""

    lr: Annotated[float, Field(ge=0)] = 2e-4
    e_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    e_high: Annotated[float, Field(ge=0)] = 4.0
    normalise: Literal["tokens", "group"] = "tokens"
    grad_clip: Annotated[float, Field(gt=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    micro_batch_tokens: Positive = 8192
    #: tree: each distinct prefix is forwarded once; none: every sample on its own
    merge: Literal["tree", "none"] = "tree"
    attention: Literal["auto", "dense", "segments", "flex", "varlen", "magi"] = "auto"
    process: AnyProcessor = Chain(steps=(Survivors(), DropZeroVariance()))
    #: torch: one process; deepspeed: `ranks` processes of this machine, partitioned as ZeRO stage `zero` says; fake:
    #: without torch, learns nothing
    engine: Literal["torch", "deepspeed", "fake"] = "torch"
    #: of the one process; ranks take the GPUs from the first on, one each, where there are any
    device: Literal["cpu", "cuda"] = "cpu"
    ranks: Positive = 2
    zero: Literal[1, 2, 3] = 2
    #: cuts a trainer step's batch into optimiser steps; none: one for the whole batch
    batches: AnyBatcher | None = None
    keep_checkpoints: Positive = 2


class Eval(Section):
    """Held-out tasks scored with greedy decoding before and after a run (0: none)."""

    tasks: Annotated[int, Field(ge=0)] = 0


class Efficiency(Section):
    """What is assumed of sample efficiency until live runs fit it: reward gained per sample, relative to fresh, mixed
    data. Each parameter is only known to lie in its range, so J is an interval (forge.metrics.efficiency)."""

    per_lag_step: Range = (0.0, 0.05)  # loss per trainer step of lag
    per_excess: Range = (0.0, 0.5)  # loss per unit of non-stationarity above 1

    @model_validator(mode="after")
    def _ordered(self) -> Efficiency:
        for name in ("per_lag_step", "per_excess"):
            low, high = getattr(self, name)
            if low > high:
                raise ValueError(f"{name} = [{low}, {high}]: a range begins with its lower end")
        return self


class Live(Section):
    """The gateway of a live run."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # 0: any free port
    tokens: str | None = None  # a file of access tokens, one a line; needed where `host` is not this machine alone
    #: what one trajectory may spend before its requests are refused and it dies of "budget"; 0: any number
    trajectory_calls: Annotated[int, Field(ge=0)] = 0
    trajectory_tokens: Annotated[int, Field(ge=0)] = 0  # sampled
    request_log: bool = False  # requests.jsonl in the run folder: a line for every request
    #: programs of `domains.agent` that run at once; others wait, and their items' time-outs run meanwhile
    programs: Positive = 4
