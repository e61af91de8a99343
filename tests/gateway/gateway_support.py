"""A scripted backend and a live server for gateway tests."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from forge.gateway.app import create_app
from forge.gateway.backend import Backend, UnknownTrajectoryError
from forge.gateway.chat import ChatCodec
from forge.gateway.fake_chat import END, FakeChatCodec
from forge.gateway.gateway import Gateway
from forge.gateway.report import Report
from forge.gateway.server import serve
from forge.rollout.engine import Delta, Sampling
from forge.types import Completion

Reply = Callable[[str, str], str | bytes]


class ScriptedBackend:
    """Answers with `reply(trajectory, prompt text)`, one token a delta (or `chunk`), then the end-of-turn token.

    While `gate` is clear, a generation stops after `gate_after` tokens. The first requests meet `failures`, one each,
    before a token; every one meets `breaking`, if set, after `gate_after` tokens.
    """

    model = "scripted"
    fault: str | None = None

    def __init__(self, reply: Reply, *, max_context: int = 1_000_000, known: set[str] | None = None) -> None:
        self.max_context = max_context
        self.records: defaultdict[str, list[Completion]] = defaultdict(list)
        self.samplings: list[Sampling] = []
        self.cancelled: list[str] = []
        self.raising: Exception | None = None
        self.breaking: Exception | None = None
        self.failures: deque[Exception] = deque()
        self.gate = asyncio.Event()
        self.gate.set()
        self.gate_after = 3
        self.chunk = 1
        self.reports: defaultdict[str, list[Report]] = defaultdict(list)
        self._reply = reply
        self._known = known
        self._clock = 0.0

    def now(self) -> float:
        self._clock += 1.0
        return self._clock

    def open(self, trajectory: str) -> Sampling:
        if self._known is not None and trajectory not in self._known:
            raise UnknownTrajectoryError(trajectory)
        return Sampling(max_tokens=4096)

    def record(self, completion: Completion) -> None:
        self.records[completion.trajectory].append(completion)

    def report(self, trajectory: str, report: Report) -> None:
        if trajectory not in self.records:
            raise UnknownTrajectoryError(trajectory)
        self.reports[trajectory].append(report)

    async def generate(
        self, trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncIterator[tuple[int, Delta]]:
        self.samplings.append(sampling)
        if self.raising:
            raise self.raising
        if self.failures:
            raise self.failures.popleft()
        text = self._reply(trajectory, FakeChatCodec().decode(prompt_ids))
        ids = [*(text.encode() if isinstance(text, str) else text), END]
        cut = ids[: sampling.max_tokens]
        try:
            for at in range(0, len(cut), self.chunk):
                if at >= self.gate_after:
                    await self.gate.wait()
                    if self.breaking:
                        raise self.breaking
                part = tuple(cut[at : at + self.chunk])
                last = at + self.chunk >= len(cut)
                finish = ("stop" if len(cut) == len(ids) else "length") if last else None
                n = len(part)
                yield 7, Delta(id="x", token_ids=part, logprobs=(-0.5,) * n, versions=(3,) * n, finish=finish)
                await asyncio.sleep(0)
        except (GeneratorExit, asyncio.CancelledError):
            self.cancelled.append(trajectory)
            raise


@dataclass
class Live:
    """A server that runs, and clients to it."""

    url: str
    gateway: Gateway

    def client(self, trajectory: str = "t1", **options: object) -> AsyncOpenAI:
        settings = {"api_key": "key", "max_retries": 0, "timeout": 20.0} | options
        return AsyncOpenAI(base_url=f"{self.url}/t/{trajectory}/v1", **settings)  # type: ignore[arg-type]

    def anthropic(self, trajectory: str = "t1", **options: object) -> AsyncAnthropic:
        settings = {"api_key": "key", "max_retries": 0, "timeout": 20.0} | options
        return AsyncAnthropic(base_url=f"{self.url}/t/{trajectory}", **settings)  # type: ignore[arg-type]


@asynccontextmanager
async def live(backend: Backend, codec: ChatCodec | None = None, **options: object) -> AsyncIterator[Live]:
    app = create_app(backend, codec or FakeChatCodec(), **options)  # type: ignore[arg-type]
    server = await serve(app)
    try:
        yield Live(server.url, app.state.gateway)
    finally:
        await server.stop()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Wait for something to become true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
