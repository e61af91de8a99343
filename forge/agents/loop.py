"""The agent: a plain tool-calling loop on the stock `openai` client. It knows a base URL and nothing of training."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import dataclass
from typing import Any

import openai

from forge.domains.base import Domain, Environment, Task, opening
from forge.domains.tools import use_tool
from forge.sections import ToolWait
from forge.types import DeathReason, ForgeError, Outcome


class ToolClock:
    """Seconds each tool call of one trajectory waits: the declared log-normal with a capped tail, seeded."""

    def __init__(self, wait: ToolWait, key: str) -> None:
        self._wait = wait
        self._random = random.Random(key)  # a string seeds by its hash digest, the same in every process
        self.total_s = 0.0

    async def sleep(self) -> None:
        if self._wait.median_s == 0:
            return
        seconds = self._wait.median_s * math.exp(self._wait.sigma * self._random.gauss(0.0, 1.0))
        seconds = min(seconds, self._wait.cap_s)
        self.total_s += seconds
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class Counts:
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0


async def run_episode(
    client: openai.AsyncOpenAI, *, model: str, trajectory: str, domain: Domain, task: Task, clock: ToolClock
) -> Outcome:
    """Play one task to its end and score it. Never raises but for cancellation: a failure is a dead outcome."""
    counts = Counts()
    try:
        environment = await domain.begin(task)
        try:
            answer = await converse(client, model, domain, task, environment, clock, counts)
            reward, reason, detail = await environment.score(answer), None, ""
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
    )


async def converse(
    client: openai.AsyncOpenAI,
    model: str,
    domain: Domain,
    task: Task,
    environment: Environment,
    clock: ToolClock,
    counts: Counts,
) -> str:
    """The final answer: the first assistant message without tool calls, or "" when the turns run out."""
    messages: list[Any] = opening(task)
    tools: Any = list(domain.tools(task))
    options: dict[str, Any] = {"tools": tools} if tools else {}
    while counts.turns < domain.max_turns:
        reply = await ask(client, model=model, messages=messages, max_tokens=domain.max_tokens, **options)
        counts.turns += 1
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            counts.tool_calls += 1
            await clock.sleep()
            result, worked = await use_tool(environment, call.function.name, call.function.arguments)
            counts.tool_errors += not worked
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def ask(client: openai.AsyncOpenAI, **request: Any) -> Any:
    """One reply. Who is refused (429) more often than the client bears asks on, until the item's time-out."""
    while True:
        try:
            return await client.chat.completions.create(**request)
        except openai.RateLimitError as refused:
            await asyncio.sleep(float(refused.response.headers.get("retry-after", 1.0)))
