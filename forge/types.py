"""The nouns both worlds share. Pure data: nothing here imports more than the standard library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: thirty thousand years: times beyond it are not simulated
LONGEST_S = 1e12


class ForgeError(ValueError):
    """A user's error: one clear line naming the key, the value and the way out; the CLI prints it and exits 2."""


class ItemState(StrEnum):
    """The life of an item (DESIGN section 2): running -> finished -> taken -> committed -> published, or dead."""

    RUNNING = "running"
    FINISHED = "finished"
    TAKEN = "taken"
    COMMITTED = "committed"
    PUBLISHED = "published"
    DEAD = "dead"


class DeathReason(StrEnum):
    """Why an item ended without being trained on. A dead item frees its slot at once and never blocks."""

    TIMEOUT = "timeout"
    AGENT_CRASH = "agent_crash"
    ENVIRONMENT = "environment"
    STALE = "stale"
    BUDGET = "budget"  # it asked for more calls or tokens than one trajectory may have
    TOO_FEW_SURVIVORS = "too_few_survivors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One engine completion as the gateway recorded it: what the engine saw and sampled, never re-tokenised text.

    `logprobs[i]` and `versions[i]` belong to `sampled_ids[i]`. Times are seconds on the run's clock.
    `finish` is the engine's reason ("stop", "length", "cancelled"). `temperature` is the one sampled at. It goes on
    from the reply of completion `parent` of its trajectory; `fork` says why not plainly (forge.gateway.recovery.Fork).
    `constrained`: it was sampled under a grammar; then a token of log probability 0 was the only one allowed, no choice
    of the policy, and carries no loss.
    """

    trajectory: str
    index: int
    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: str
    temperature: float
    received_s: float
    first_token_s: float
    finished_s: float
    instance: int
    parent: int | None = None
    fork: str | None = None
    constrained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the agent side says of one trajectory. `reward` is null when it died; `reason` then says why.
    `reward_parts`: what the reward was made of, where the agent side tells; by name. `scaffold`: id of the one it ran
    in (forge.scaffolds); `faults`: what was wrong with replies and calls, by kind; `contexts`: the record of a context
    that was not only appended to (forge.agents.record)."""

    trajectory: str
    reward: float | None
    reason: DeathReason | None = None
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    tool_wait_s: float = 0.0
    detail: str = ""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    scaffold: str = ""
    faults: Mapping[str, int] = field(default_factory=dict)
    contexts: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One member of an item: the completions the gateway recorded, and the outcome the agent side reported."""

    id: str
    position: int
    member: int
    completions: tuple[Completion, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One token sequence to train on. All tuples have the length of `token_ids`.

    `loss[t]` marks sampled tokens; elsewhere `logprobs` and `advantages` are 0. `logprobs[t]` is the rollout log
    probability of token t given tokens before it, under the distribution sampled (at `temperature`). Token 0 never
    carries loss: it has no logprob.
    """

    position: int
    member: int
    token_ids: tuple[int, ...]
    loss: tuple[bool, ...]
    logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    temperature: float = 1.0


Json = dict[str, Any]
