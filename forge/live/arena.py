"""Episodes of given scaffolds on one engine, through the gateway and into a pool: no queue, no trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import openai

from forge.agents.loop import ToolClock, overdue, run_episode
from forge.domains.base import Task
from forge.domains.registry import get_domain
from forge.gateway.app import create_app
from forge.gateway.chat import ChatCodec
from forge.gateway.local import EngineBackend
from forge.gateway.server import serve
from forge.live.recording import PoolRecording
from forge.scaffolds import Scaffold
from forge.sections import ToolWait
from forge.types import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One episode; `name` is its trajectory's. `max_tokens` of a reply; None: what its scaffold leaves its domain."""

    name: str
    task: Task
    scaffold: Scaffold
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Arena:
    """A gateway that is up, and a client to it."""

    backend: EngineBackend
    url: str
    client: openai.AsyncOpenAI

    async def play(
        self, plays: Iterable[Play], *, at_once: int, timeout_s: float, told: Callable[[Outcome], None]
    ) -> list[Outcome]:
        """Every episode to its end, in the order given; `told` hears of each as it ends."""
        gate = asyncio.Semaphore(at_once)

        async def one(play: Play) -> Outcome:
            async with gate:
                outcome = await self._episode(play, timeout_s)
            self.backend.sessions.end(outcome)
            told(outcome)
            return outcome

        return await asyncio.gather(*map(one, plays))

    async def _episode(self, play: Play, timeout_s: float) -> Outcome:
        try:
            async with asyncio.timeout(timeout_s):
                return await run_episode(
                    self.client.with_options(base_url=f"{self.url}/t/{play.name}/v1"),
                    model=self.backend.model,
                    trajectory=play.name,
                    domain=get_domain(play.task.domain),
                    task=play.task,
                    clock=ToolClock(ToolWait(), play.name),
                    scaffold=play.scaffold,
                    max_tokens=play.max_tokens,
                )
        except TimeoutError:
            return overdue(play.name, timeout_s, play.scaffold.id)


@contextlib.asynccontextmanager
async def arena(
    backend_of: Callable[[PoolRecording], EngineBackend], codec: ChatCodec, folder: Path
) -> AsyncIterator[Arena]:
    """Trajectories are kept in `folder`, in the pool of forge.live.recording, which the backend is made with."""
    async with contextlib.AsyncExitStack() as stack:
        backend = backend_of(stack.enter_context(PoolRecording(folder)))
        stack.callback(backend.close)
        app = create_app(backend, codec)
        backend.sessions.attach(app.state.gateway)
        stack.callback(backend.sessions.close_all, "the arena was closed")
        server = await serve(app)
        stack.push_async_callback(server.stop)
        client = openai.AsyncOpenAI(base_url=server.url, api_key="forge", max_retries=3, timeout=600.0)
        await stack.enter_async_context(client)
        yield Arena(backend, server.url, client)
