"""Our side of `forge bench gateway`: the gateway as agents meet it, before the stub engine over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Sequence
from multiprocessing.connection import Connection

from forge.gateway.app import create_app
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.report import Report
from forge.gateway.server import calm_collector, loop_factory, serve
from forge.gateway.sessions import Sessions
from forge.rollout.engine import Delta, EngineError, Sampling
from forge.types import Completion


class StampCodec(FakeChatCodec):
    """What the stub samples are numbers: their text is that of its chat chunks."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"{one} " for one in ids)


class StubBackend:
    """A `forge.gateway.backend.Backend` that gets its tokens from the stub, a connection a request."""

    model, max_context, fault = "stub", 1 << 30, None

    def __init__(self, port: int) -> None:
        self._port = port
        self.sessions = Sessions(self.now)

    def now(self) -> float:
        return time.monotonic()

    def open(self, trajectory: str) -> Sampling:
        self.sessions.check(trajectory)
        return Sampling(max_tokens=1 << 20)

    def record(self, completion: Completion) -> None:
        self.sessions.record(completion)

    def report(self, trajectory: str, report: Report) -> None:
        self.sessions.report(trajectory, report)

    async def generate(
        self, trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        with self.sessions.generating(trajectory):
            body = json.dumps({"token_ids": prompt_ids, "max_tokens": sampling.max_tokens}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(b"POST /generate HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                async for line in reader:
                    if line.startswith(b"data: "):
                        yield 0, _delta(json.loads(line[6:]))
            finally:
                writer.close()


def _delta(data: dict[str, object]) -> Delta:
    ids = data.get("token_ids", ())
    if not isinstance(ids, list | tuple):
        raise EngineError(f"the stub sent {data}")
    finish = "stop" if data.get("finish") else None
    return Delta(id="", token_ids=tuple(ids), logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), finish=finish)  # type: ignore[arg-type]


def main(pipe: Connection, stub_port: int) -> None:
    """Entry point of the process: tells its port, and serves until it is killed."""

    async def run() -> None:
        backend = StubBackend(stub_port)
        app = create_app(backend, StampCodec())
        backend.sessions.attach(app.state.gateway)
        server = await serve(app)
        calm_collector()
        pipe.send(server.port)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
