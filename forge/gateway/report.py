"""What an agent or its harness says of a trajectory, in any number of parts, each any number of times.

    POST /t/NAME/report
    {"reward": 0.75, "reward_parts": {"tests": 0.5, "style": 0.25},
     "reason": "timeout", "detail": "text",
     "tools": [{"id": "call_...", "seconds": 1.5, "failed": false}],
     "ended": true}

Every field may be absent. A later part replaces the fields it names; tools are told apart by their call's id. So a part
that is sent twice says what it says once. `ended` closes the trajectory. What is never reported is measured: turns and
calls from the replies, the seconds of tools as those between a reply with calls and the request that goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forge.gateway.recovery import Conversations
from forge.types import Completion, DeathReason, Outcome

#: what the agent side can know a trajectory died of
REASONS = (DeathReason.TIMEOUT, DeathReason.AGENT_CRASH, DeathReason.ENVIRONMENT)


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One tool call as its harness saw it."""

    seconds: float
    failed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was said so far. A trajectory has a reward, or a reason why it died, or neither yet."""

    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    reason: DeathReason | None = None
    detail: str = ""
    tools: Mapping[str, ToolRun] = field(default_factory=dict)
    ended: bool = False

    def joined(self, part: Report) -> Report:
        """With a later part, whose word counts."""
        settled = part if part.reward is not None or part.reason is not None else self
        return Report(
            reward=settled.reward,
            reason=settled.reason,
            reward_parts=part.reward_parts or self.reward_parts,
            detail=part.detail or self.detail,
            tools={**self.tools, **part.tools},
            ended=self.ended or part.ended,
        )

    def outcome(self, measured: Outcome) -> Outcome:
        """`measured`, and over it what was said. Without a reward or a reason those of `measured` stay."""
        said = replace(measured, reward_parts=dict(self.reward_parts), detail=self.detail or measured.detail)
        if self.reward is not None or self.reason is not None:
            said = replace(said, reward=self.reward, reason=self.reason, detail=self.detail)
        if not self.tools:
            return said
        runs = self.tools.values()
        return replace(
            said,
            tool_calls=len(runs),
            tool_errors=sum(run.failed for run in runs),
            tool_wait_s=sum(run.seconds for run in runs),
        )


def measured(
    trajectory: str, tree: Conversations, completions: Sequence[Completion], *, reason: DeathReason, detail: str
) -> Outcome:
    """What the gateway alone can tell of a trajectory of which nobody said how it ended: it died of `reason`."""
    calls = {number: len(node.reply.get("tool_calls", ())) for number, node in tree.nodes.items()}
    ended_s = {one.index: one.finished_s for one in completions}
    waits: dict[int, float] = {}  # by the reply that made the calls: to the first request that goes on from it
    for one in completions:
        if one.parent in ended_s and calls.get(one.parent):
            wait = max(0.0, one.received_s - ended_s[one.parent])
            waits[one.parent] = min(wait, waits.get(one.parent, wait))
    return Outcome(
        trajectory=trajectory,
        reward=None,
        reason=reason,
        turns=len(completions),
        tool_calls=sum(calls.values()),
        tool_wait_s=sum(waits.values()),
        detail=detail,
    )
