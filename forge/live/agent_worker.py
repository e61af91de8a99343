"""The child process that plays agents: many episodes at once in one event loop, all through the gateway. A domain
with a recipe is played by the program of that recipe, the others by Forge's own loop.

In:  ("play", trajectory, Task, tool_wait | None, timeout_s), ("cancel", trajectory), ("base", url, model, key)
Out: ("ready",), ("outcome", Outcome)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import openai

from forge.agents.loop import ToolClock, overdue, run_episode
from forge.blackbox.launcher import Gateway, Launch
from forge.blackbox.recipe import Recipe, folders_of, load
from forge.domains.base import Task
from forge.domains.registry import get_domain, warm_up
from forge.live.scaffolding import scaffold_of
from forge.scenario import Scenario
from forge.sections import ToolWait
from forge.types import Outcome


class AgentLoop:
    """Starts an episode per "play" message and reports each outcome exactly once, cancelled ones excepted."""

    def __init__(self, pipe: Connection, scenario: Scenario, recipes: Mapping[str, Recipe]) -> None:
        """`recipes` by domain."""
        self.pipe = pipe
        self.scenario = scenario
        self.recipes = recipes
        self.places = asyncio.Semaphore(scenario.live.programs)
        self.gateway: Gateway | None = None
        self.client: openai.AsyncOpenAI | None = None
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
                self.gateway = Gateway(url=url, model=model, key=key)
                self.client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=3, timeout=600.0)
            case ("play", trajectory, task, wait, timeout_s):
                episode = asyncio.get_running_loop().create_task(self.play(trajectory, task, wait, timeout_s))
                self.episodes[trajectory] = episode
            case ("cancel", trajectory):
                if trajectory in self.episodes:
                    self.episodes.pop(trajectory).cancel()

    async def play(self, trajectory: str, task: Task, wait: ToolWait, timeout_s: float) -> None:
        # Waits follow position and member, not the attempt: a resumed item meets the same tools.
        clock = ToolClock(wait, f"{self.scenario.seed}:{trajectory.rsplit('.', 1)[0]}")
        try:
            async with asyncio.timeout(timeout_s):
                outcome = await self.episode(trajectory, task, clock)
        except TimeoutError:
            scaffold = "" if task.domain in self.recipes else scaffold_of(self.scenario, trajectory).id
            outcome = overdue(trajectory, timeout_s, scaffold)
        self.episodes.pop(trajectory, None)
        self.pipe.send(("outcome", outcome))

    async def episode(self, trajectory: str, task: Task, clock: ToolClock) -> Outcome:
        assert self.client is not None
        assert self.gateway is not None
        domain, recipe = get_domain(task.domain), self.recipes.get(task.domain)
        if recipe is not None:
            async with self.places:
                launch = Launch(recipe, self.gateway, trajectory, domain, task, clock)
                return (await launch.play()).outcome
        return await run_episode(
            self.client.with_options(base_url=f"{self.gateway.url}/t/{trajectory}/v1"),
            model=self.gateway.model,
            trajectory=trajectory,
            domain=domain,
            task=task,
            clock=clock,
            scaffold=scaffold_of(self.scenario, trajectory),
        )


def main(pipe: Connection, scenario: Scenario) -> None:
    """Entry point of the child."""
    recipes = {domain.name: load(domain.agent) for domain in scenario.domains if domain.agent}
    for recipe in recipes.values():
        folders_of(recipe)
    warm_up(domain.name for domain in scenario.domains)
    asyncio.run(AgentLoop(pipe, scenario, recipes).run())
