"""The generations that answer one request: one as a rule, several for `n` or for several prompts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from forge.gateway.generation import Generation, Step


class Choices:
    """Generations that are waited for, retried and ended together.

    `unkept` names fields of the request that the replies need not obey.
    """

    def __init__(self, generations: Sequence[Generation], unkept: tuple[str, ...]) -> None:
        self.generations = generations
        self.unkept = unkept

    @property
    def failed(self) -> bool:
        return any(generation.failed for generation in self.generations)

    def cancel(self) -> None:
        for generation in self.generations:
            generation.cancel()

    def nudge(self) -> None:
        for generation in self.generations:
            generation.nudge()

    def settle(self) -> None:
        """Record them all, the first time."""
        for generation in self.generations:
            generation.settle()

    async def steps(self) -> AsyncIterator[tuple[int, Step | None]]:
        """(choice, step) as they come, each choice's in order. Raises what the first to fail died of."""
        if len(self.generations) == 1:
            async for step in self.generations[0].steps():
                yield 0, step
            return
        news: asyncio.Queue[tuple[int, Step | None]] = asyncio.Queue()
        readers = [asyncio.create_task(_forward(at, one, news)) for at, one in enumerate(self.generations)]
        ended = asyncio.gather(*readers)
        ended.add_done_callback(lambda _: news.put_nowait((-1, None)))
        try:
            while (item := await news.get())[0] >= 0:
                yield item
            await ended
        finally:
            ended.cancel()


async def _forward(at: int, generation: Generation, news: asyncio.Queue[tuple[int, Step | None]]) -> None:
    async for step in generation.steps():
        news.put_nowait((at, step))
