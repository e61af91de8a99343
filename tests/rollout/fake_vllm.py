"""A deterministic stand-in for vLLM's server: the HTTP that Forge uses of it, around the fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from forge.rollout.engine import Delta, EngineDied, EngineRequest, Sampling
from forge.rollout.fake_engine import FakeEngine
from forge.rollout.vllm.server import free_port

BLOCK = 4


def token_at(prompt_ids: tuple[int, ...], place: int, vocabulary: int) -> int:
    """What it samples at `place` of a context, whatever of it was prompt."""
    return (sum(prompt_ids[:2]) + place) % vocabulary


@dataclass
class FakeVllm:
    """Serves in a thread of its own until `stop`. `faults`: what goes wrong from now on, by name."""

    vocabulary: int
    slots: int = 8
    max_context: int = 64
    interval: int = 3
    tick_s: float = 0.001
    faults: set[str] = field(default_factory=set)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    lives: bool = True

    def __post_init__(self) -> None:
        self.engine = FakeEngine(
            lambda prompt, index, _: token_at(prompt, len(prompt) + index, self.vocabulary),
            slots=self.slots,
            max_context=self.max_context,
            vocab_size=self.vocabulary,
            logprob=lambda prompt, index, token: -0.01 * (len(prompt) + index) - token,
        )
        self.label = "default"
        self.paused = False
        self._versions = ["default"]
        self._streams: dict[str, asyncio.Queue[Delta]] = {}
        self._blocks: set[tuple[str, tuple[int, ...]]] = set()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        paths = {"generate": self._generate, "pause": self._pause, "resume": self._resume}
        paths |= {"collective_rpc": self._rpc, "update_weight_version": self._relabel}
        routes = [
            Route(f"/{'inference/v1/' * (name == 'generate')}{name}", endpoint, methods=["POST"])
            for name, endpoint in paths.items()
        ]
        routes.append(Route("/health", self._health))
        config = uvicorn.Config(
            Starlette(routes=routes), host="127.0.0.1", port=port, log_level="error", lifespan="off", ws="none"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.005)

    def died(self, why: str) -> EngineDied:
        self.lives = False
        return EngineDied(why)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        stepping = asyncio.create_task(self._step())
        try:
            await self._server.serve()
        finally:
            stepping.cancel()

    async def _step(self) -> None:
        while True:
            for delta in [] if self.paused else self.engine.step():
                self._streams[delta.id].put_nowait(delta)
            await asyncio.sleep(self.tick_s)

    async def _health(self, _: Request) -> Response:
        return Response(status_code=503 if "dead" in self.faults else 200)

    async def _pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "keep"
        self.paused = True
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def _rpc(self, request: Request) -> Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        assert self.paused, "weights came while it sampled"
        if "dead" in self.faults:
            await asyncio.sleep(3600)  # as a server whose engine is gone: it never answers
        if "reload" in self.faults:
            return JSONResponse({"error": {"message": "out of memory"}}, status_code=500)
        folder = Path(body["kwargs"]["weights_path"])
        self.loaded.append(",".join(sorted(path.name for path in folder.iterdir())))
        return JSONResponse({"results": [None]})

    async def _relabel(self, request: Request) -> Response:
        self.label = (await request.json())["new_version"]
        self._versions.append(self.label)
        self.engine.load(None, len(self._versions) - 1)
        return JSONResponse({"success": True})

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if "refuse" in self.faults:
            return JSONResponse({"error": {"message": "too long for this server"}}, status_code=400)
        wanted = body["sampling_params"]
        sampling = Sampling(max_tokens=wanted["max_tokens"], stop_ids=tuple(wanted["stop_token_ids"]))
        key, prompt = body["request_id"], tuple(body["token_ids"])
        self._streams[key] = asyncio.Queue()
        self.engine.add(EngineRequest(id=key, prompt_ids=prompt, sampling=sampling))
        return StreamingResponse(self._stream(key, self._cached(body["cache_salt"], prompt)))

    def _cached(self, salt: str, prompt: tuple[int, ...]) -> int:
        """Prompt tokens in blocks that a request with the same salt left; the last token is always computed."""
        ends = range(BLOCK, len(prompt), BLOCK)
        found = sum(BLOCK for end in ends if (salt, prompt[:end]) in self._blocks)
        self._blocks |= {(salt, prompt[:end]) for end in ends}
        return found

    async def _stream(self, key: str, cached: int) -> AsyncIterator[str]:
        parts: list[Delta] = []
        sent = 0
        try:
            while not parts or parts[-1].finish is None:
                parts.append(await self._streams[key].get())
                if "cut" in self.faults or ("cut once" in self.faults and len(parts) == 3):
                    self.faults.discard("cut once")
                    raise ConnectionResetError
                finish = parts[-1].finish
                if finish is not None or sent == 0 or len(parts) - sent >= self.interval:
                    yield self._event(parts[sent:], parts if finish else None, finish)
                    sent = len(parts)
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.engine.cancel(key)

    def _event(self, new: list[Delta], whole: list[Delta] | None, finish: str | None) -> str:
        content = [{"token_id": d.token_ids[0], "logprob": d.logprobs[0]} for d in new]
        spans: list[dict[str, Any]] = []
        for place, delta in enumerate(whole or ()):
            label = "99" if "mislabel" in self.faults else self._versions[delta.versions[0]]
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": place, "end": place})
            spans[-1]["end"] += 1
        choice = {
            "index": 0,
            "token_ids": [d.token_ids[0] for d in new],
            "logprobs": {"content": content},
            "finish_reason": finish,
            "weight_versions": spans if whole else None,
        }
        return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"
