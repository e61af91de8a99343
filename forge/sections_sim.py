"""Sections of the simulator: its model of the machine and of the work."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from forge.sections import NotNegative, Positive, Seconds, Section, SomeSeconds
from forge.sections_agents import AgentDomain
from forge.sections_rollout import Prefill, Speculation, TierSizes
from forge.types import LONGEST_S

#: of reports: a simulated hour of reports at this period takes some seconds, at a hundredth of it many minutes
LEAST_PERIOD_S = 0.01
#: no draw of an exponential law is that many times its mean
MANY_MEANS = 1e3
#: of a token or a row, of which a batch may have a thousand million
SecondsEach = Annotated[float, Field(ge=0, lt=LONGEST_S / 1e9)]


class Deployed(Section):
    """Instances that the cost model times: a model on `tp * dp` devices, in the cards' names or files of yours.

    `kv_tokens`: what the KV cache of an instance holds; by default what the devices' memory leaves beside the weights.
    `budget`: tokens an iteration computes at most, prompts in chunks.
    """

    model: str
    hardware: str
    tp: Positive = 1
    ep: Positive = 1
    dp: Positive = 1
    dense: str = "bf16"
    experts: str = "bf16"
    kv: str = "bf16"
    budget: Positive = 8192
    kv_tokens: Positive | None = None
    calibration: str | None = None  # a file written by `forge calibrate --points` or `--table`
    calibrated: str = ""  # which of the file's deployments; not needed where it has one
    prefill: Prefill | None = None  # prompts on instances of their own


class SignalTimes(Section):
    """An instance reports its load and its cached prefixes every `period_s`; routers know `delay_s` later."""

    period_s: Annotated[float, Field(lt=LONGEST_S)] = 1.0
    delay_s: Seconds = 0.1

    @field_validator("period_s")
    @classmethod
    def _no_shorter_than_it_pays(cls, period_s: float) -> float:
        if period_s < LEAST_PERIOD_S:
            raise ValueError(
                f"iterations of most deployments take longer, so such reports bring no news and take long to simulate; "
                f"give at least {LEAST_PERIOD_S:g}, or leave sim.signals out: routers then see what is in flight"
            )
        return period_s


class SimDomain(Section):
    """Workload of one domain, fitted by `forge calibrate`. Log-normals by median and sigma; tails are capped."""

    turns: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = (0.3, 0.4, 0.3)  # P(1, 2, ...)
    prompt_tokens: Positive = 48  # of the first turn
    turn_tokens: Annotated[int, Field(ge=0)] = 16  # a later turn's prompt grows by these beside what was sampled
    tokens_median: Annotated[float, Field(gt=0)] = 12.0  # sampled tokens per turn
    tokens_sigma: NotNegative = 0.5
    tokens_cap: Positive = 256
    #: share of the variance of turns, lengths and outcomes that all members of an item have in common: harder items
    #: are longer and pass less often
    item_share: Annotated[float, Field(ge=0, le=1)] = 0.3
    difficulty_mean: float = 3.0
    difficulty_sd: NotNegative = 1.0
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
    step_s: SomeSeconds = 4e-3
    row_s: SecondsEach = 1e-4
    prefill_token_s: SecondsEach = 2e-5
    cached_share: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of prompt tokens whose KV is reused
    cached_share_later: Annotated[float, Field(ge=0, lt=1)] | None = None  # of a later turn's; None: as of the first's
    #: seconds of agent and gateway work around one completion, on one core that all share, and its fixed latency
    request_cpu_s: Seconds = 3e-3
    request_latency_s: Seconds = 2e-3
    #: a trainer step takes data_s + train_step_s + train_token_s * tokens; then it saves; an engine loads
    data_s: Seconds = 0.0
    train_step_s: Seconds = 0.05
    train_token_s: SecondsEach = 1e-4
    save_s: Seconds = 0.02
    load_s: Seconds = 0.01
    #: tokens of a KV block, in which prefixes are shared
    block: Positive = 16
    #: real accelerators instead of step_s, row_s, prefill_token_s and cached_share
    deployment: Deployed | None = None
    #: both only with `deployment`, which says what a token's KV takes; None: neither
    tiers: TierSizes | None = None
    speculation: Speculation | None = None
    #: None: routers see in-flight counts only
    signals: SignalTimes | None = None
    instance_mtbf_s: Annotated[float, Field(gt=0, lt=LONGEST_S / MANY_MEANS)] | None = None
    instance_repair_s: Seconds = 5.0
    #: share of the instances, rounded up, whose iterations take `slow_factor` times as long; the seed says which
    slow_nodes: Annotated[float, Field(ge=0, le=1)] = 0.0
    slow_factor: Annotated[float, Field(ge=1)] = 2.0
    domains: dict[str, SimDomain] = Field(default_factory=dict)
    #: synthetic agents instead of `domains`: for every domain of the mix or for none
    agents: dict[str, AgentDomain] = Field(default_factory=dict)
    calibrated_from: str | None = None

    @model_validator(mode="after")
    def _deployed(self) -> Sim:
        for key in ("tiers", "speculation"):
            if getattr(self, key) is not None and self.deployment is None:
                raise ValueError(f"{key}: needs sim.deployment, which says what tokens cost; add it or leave {key} out")
        return self
