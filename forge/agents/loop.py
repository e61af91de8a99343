"""The agent: a scaffold (forge.scaffolds) at work on one task. It knows a base URL and nothing of training.

The default scaffold is a plain tool-calling loop on the API's own fields that keeps everything.
"""

from __future__ import annotations

import openai

from forge.agents.episode import Counts, Episode, ToolClock
from forge.agents.loops import RUN
from forge.agents.record import record
from forge.domains.base import Domain, Task
from forge.scaffolds import DEFAULT, Scaffold, get
from forge.types import DeathReason, ForgeError, Outcome

__all__ = ["PLAIN", "ToolClock", "overdue", "run_episode"]

PLAIN = get(DEFAULT)


def overdue(trajectory: str, seconds: float, scaffold: str) -> Outcome:
    """Of an episode that was ended after so long."""
    return Outcome(
        trajectory=trajectory,
        reward=None,
        reason=DeathReason.TIMEOUT,
        detail=f"over {seconds:g} s",
        scaffold=scaffold,
    )


async def run_episode(
    client: openai.AsyncOpenAI,
    *,
    model: str,
    trajectory: str,
    domain: Domain,
    task: Task,
    clock: ToolClock,
    scaffold: Scaffold = PLAIN,
    max_tokens: int | None = None,
) -> Outcome:
    """Play one task to its end and score it. Never raises but for cancellation: a failure is a dead outcome.

    `max_tokens` of a reply; as many as the scaffold leaves the domain, if not given.
    """
    counts = Counts()
    reward, reason, detail, kept = None, None, "", None
    try:
        environment = await domain.begin(task)
        try:
            room = scaffold.room(domain.max_tokens) if max_tokens is None else max_tokens
            episode = Episode(client, model, domain, task, environment, clock, counts, scaffold, room)
            answer = await RUN[scaffold.loop](episode)
            reward, kept = await environment.score(answer), record(episode.talks, episode.served)
        finally:
            await environment.close()
    except (openai.OpenAIError, ForgeError) as error:
        reward, reason, detail = None, DeathReason.ENVIRONMENT, f"{type(error).__name__}: {error}"[:200]
    except Exception as error:
        reward, reason, detail = None, DeathReason.AGENT_CRASH, f"{type(error).__name__}: {error}"[:200]
    return Outcome(
        trajectory=trajectory,
        reward=reward,
        reason=reason,
        turns=counts.turns,
        tool_calls=counts.tool_calls,
        tool_errors=counts.tool_errors,
        tool_wait_s=clock.total_s,
        detail=detail,
        scaffold=scaffold.id,
        faults=dict(counts.faults),
        contexts=kept,
    )
