"""The stand-alone backend: one engine in a thread."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import openai
import pytest
from gateway_support import live, until

from forge.gateway.fake_chat import END
from forge.gateway.local import EngineBackend
from forge.rollout.engine import Delta, EngineError, EngineRequest, EngineStats

HELLO = [{"role": "user", "content": "hello"}]


class EchoEngine:
    """Answers with the prompt's own bytes, one token a step, as slowly as its gate allows."""

    version, slots, max_context = 1, 4, 200

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.running: dict[str, deque[int]] = {}
        self.cancelled: set[str] = set()
        self.endless = False
        self.broken = False

    @property
    def load_in_flight(self) -> tuple[int, int]:
        return len(self.running), 0

    def add(self, request: EngineRequest) -> None:
        if len(request.prompt_ids) > 100:
            raise EngineError(f"prompt of {len(request.prompt_ids)} tokens is over 100")
        self.running[request.id] = deque([*(i for i in request.prompt_ids if i < END), END])

    def cancel(self, request_id: str) -> None:
        if request_id in self.running:
            self.cancelled.add(request_id)

    def load(self, weights: Path | None, version: int, *, recompute: bool = False) -> None:
        raise NotImplementedError

    def step(self) -> list[Delta]:
        if self.broken:
            raise RuntimeError("out of memory")
        return [delta for request_id in list(self.running) for delta in self._advance(request_id)]

    def _advance(self, request_id: str) -> list[Delta]:
        if request_id in self.cancelled:
            del self.running[request_id]
            return [Delta(id=request_id, finish="cancelled")]
        token = self.running[request_id][0] if self.endless else self.running[request_id].popleft()
        last = not self.running[request_id]
        if last:
            del self.running[request_id]
        finish = "stop" if last else None
        return [Delta(id=request_id, token_ids=(token,), logprobs=(-1.0,), versions=(1,), finish=finish)]


async def test_many_at_once_each_its_own() -> None:
    backend = EngineBackend(EchoEngine(), model="echo")
    async with live(backend) as server:

        async def ask(name: str) -> str | None:
            async with server.client(name) as client:
                messages = [{"role": "user", "content": name}]
                reply = await client.chat.completions.create(model="m", messages=messages)
                return reply.choices[0].message.content

        names = [f"trajectory {i}" for i in range(8)]
        assert await asyncio.gather(*map(ask, names)) == names
    backend.close()
    assert {name: len(one.completions) for name, one in backend.sessions.open.items()} == dict.fromkeys(names, 1)


async def test_hang_up_reaches_the_engine_and_refusals_reach_the_client() -> None:
    engine = EchoEngine()
    engine.endless = True
    backend = EngineBackend(engine)
    async with live(backend, retry_grace_s=0) as server, server.client() as client:
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
        await until(lambda: engine.running)
        asking.cancel()
        await until(lambda: engine.cancelled and not engine.running)
        with pytest.raises(openai.BadRequestError, match="over 100"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 150}])
    backend.close()
    assert not any(one.completions for one in backend.sessions.open.values())


async def test_a_broken_engine_fails_requests_now_and_later(caplog: pytest.LogCaptureFixture) -> None:
    engine = EchoEngine()
    engine.broken = True
    backend = EngineBackend(engine)
    async with live(backend) as server, server.client() as client:
        for _ in range(2):
            with pytest.raises(openai.InternalServerError):
                await client.chat.completions.create(model="m", messages=HELLO)
    backend.close()
    assert "out of memory" in caplog.text
