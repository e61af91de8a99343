"""The child process that plays agents: many episodes at once in one event loop, all through the gateway.

In:  ("play", trajectory, Task, tool_wait | None, timeout_s), ("cancel", trajectory), ("base", url, model, key)
Out: ("ready",), ("outcome", Outcome)
"""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from typing import Any

import openai

from forge.agents.loop import ToolClock, run_episode
from forge.domains.base import Task
from forge.domains.registry import get_domain, warm_up
from forge.sections import ToolWait
from forge.types import DeathReason, Outcome


class AgentLoop:
    """Starts an episode per "play" message and reports each outcome exactly once, cancelled ones excepted."""

    def __init__(self, pipe: Connection, seed: int) -> None:
        self.pipe = pipe
        self.seed = seed
        self.model = ""
        self.client: openai.AsyncOpenAI | None = None
        self.base = ""
        self.episodes: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def readable() -> None:
            try:
                while self.pipe.poll():
                    self.take(self.pipe.recv())
            except (EOFError, OSError):
                loop.remove_reader(self.pipe.fileno())
                ended.set_result(None)

        loop.add_reader(self.pipe.fileno(), readable)
        self.pipe.send(("ready",))
        await ended

    def take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("base", url, model, key):
                self.base, self.model = url, model
                self.client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=3, timeout=600.0)
            case ("play", trajectory, task, wait, timeout_s):
                episode = asyncio.get_running_loop().create_task(self.play(trajectory, task, wait, timeout_s))
                self.episodes[trajectory] = episode
            case ("cancel", trajectory):
                if trajectory in self.episodes:
                    self.episodes.pop(trajectory).cancel()

    async def play(self, trajectory: str, task: Task, wait: ToolWait, timeout_s: float) -> None:
        assert self.client is not None
        client = self.client.with_options(base_url=f"{self.base}/t/{trajectory}/v1")
        # Waits follow position and member, not the attempt: a resumed item meets the same tools.
        clock = ToolClock(wait, f"{self.seed}:{trajectory.rsplit('.', 1)[0]}")
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await run_episode(
                    client,
                    model=self.model,
                    trajectory=trajectory,
                    domain=get_domain(task.domain),
                    task=task,
                    clock=clock,
                )
        except TimeoutError:
            outcome = Outcome(
                trajectory=trajectory, reward=None, reason=DeathReason.TIMEOUT, detail=f"over {timeout_s:g} s"
            )
        self.episodes.pop(trajectory, None)
        self.pipe.send(("outcome", outcome))


def main(pipe: Connection, seed: int, domains: list[str]) -> None:
    """Entry point of the child."""
    warm_up(domains)
    asyncio.run(AgentLoop(pipe, seed).run())
