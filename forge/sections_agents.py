"""Sections of synthetic agents (`sim.synthetic`): how long they talk, wait and remember, and how they fail.

Defaults are of the field: outputs, results of tools and sub-agents of 447 recorded coding sessions (kv-cache-tester),
tool waits with p50 9 s, p90 71 s, p99 611 s.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from forge.sections import NotNegative, Positive, Section, SomeSeconds

Tokens = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(ge=0, le=1)]


class Spread(Section):
    """Log-normal body up to its quantile 1 - tail_share, Pareto tail from there, all capped. In its owner's unit."""

    median: Annotated[float, Field(gt=0)]
    sigma: NotNegative = 1.0  # of the logarithm
    tail_share: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    tail_index: Annotated[float, Field(gt=0)] = 1.5  # the chance of twice as much is 2^-index: small is heavy
    cap: SomeSeconds  # or tokens

    @model_validator(mode="after")
    def _cap_above(self) -> Spread:
        if self.cap < self.median:
            raise ValueError(f"cap = {self.cap:g} must be at least median = {self.median:g}")
        return self


class SubAgents(Section):
    """A call may spawn agents with a context of their own; the next call waits for all of them."""

    rate: Probability = 0.00125  # of a call
    most: Annotated[int, Field(ge=1, le=64)] = 1  # spawned at once: 1 to `most`, equally likely
    calls: Spread = Spread(median=9.0, sigma=0.6, cap=32.0)
    system_tokens: Tokens = 9000  # shared by all sub-agents of the domain
    task_tokens: Positive = 500


class Context(Section):
    """An agent whose next prompt leaves less than `reserve_tokens` of the limit rewrites its context.

    It keeps the longest prompt it had of at most `kept_tokens` (at least its first one: system prompt and task), and
    writes `summary_tokens` in place of the rest.
    """

    limit_tokens: Positive = 131072  # prompt and answer, as the agent believes; the engine's own is engine.max_context
    reserve_tokens: Positive = 8192
    kept_tokens: Tokens = 0
    summary_tokens: Positive = 2000


class Failures(Section):
    """`crash` is of a member, `hang` of a tool call. A tool that waits `timeout_s` fails; that kills some members."""

    crash: Annotated[float, Field(ge=0, lt=1)] = 0.0
    hang: Probability = 0.001
    timeout_s: SomeSeconds = 1800.0
    kills: Probability = 0.25  # of time-outs


class AgentDomain(Section):
    """Agents of one domain: a member calls the model `calls` times, with a tool between two calls.

    Spreads are over items: counted over calls, outputs are longer where `item_share` > 0, because items with longer
    answers have more calls.
    """

    share: Annotated[float, Field(gt=0)] = 1.0  # of items, relative to the other domains'
    calls: Spread = Spread(median=8.0, sigma=0.7, cap=64.0)  # of a member
    system_tokens: Tokens = 15000  # shared by all items of the domain
    task_tokens: Spread = Spread(median=500.0, sigma=0.8, cap=4000.0)  # shared by the members of an item
    #: tokens sampled by a call; the longest are 28 medians
    output_tokens: Spread = Spread(median=212.0, sigma=1.1, tail_share=0.03, tail_index=1.43, cap=6000.0)
    result_tokens: Spread = Spread(median=367.0, sigma=1.7, cap=32000.0)  # that a tool adds to the next prompt
    #: seconds
    tool_wait: Spread = Spread(median=9.0, sigma=1.612, tail_share=0.05, tail_index=1.0276, cap=3600.0)
    sub_agents: SubAgents = SubAgents()
    context: Context = Context()
    failures: Failures = Failures()
    #: share of the variance of calls, lengths and outcomes that all members of an item have in common: harder items
    #: are longer and pass less often
    item_share: Probability = 0.3
    difficulty_mean: float = 3.0
    difficulty_sd: NotNegative = 1.0
    reward: Probability = 0.3  # share of members that pass

    def first_prompt(self) -> int:
        """Tokens of the longest prompt that an agent or a sub-agent begins with."""
        subs = self.sub_agents
        of_subs = subs.system_tokens + subs.task_tokens if subs.rate else 0
        return max(self.system_tokens + int(self.task_tokens.cap), of_subs)

    @model_validator(mode="after")
    def _room(self) -> AgentDomain:
        """An agent must have room for an answer after its first prompt and after every rewriting."""
        context, subs = self.context, self.sub_agents
        prompt = max(self.first_prompt(), context.kept_tokens) + context.summary_tokens
        if prompt + context.reserve_tokens > context.limit_tokens:
            raise ValueError(
                f"context.limit_tokens = {context.limit_tokens}: a first or rewritten prompt may have {prompt} tokens "
                f"and context.reserve_tokens = {context.reserve_tokens}; raise the limit or shorten the prompts"
            )
        if self.failures.hang + subs.rate > 1:
            raise ValueError(f"failures.hang = {self.failures.hang:g} and sub_agents.rate = {subs.rate:g} exceed 1")
        return self
