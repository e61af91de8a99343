"""`VllmEngine`: the `Engine` protocol spoken to a vLLM server.

It keeps its own queue, so that what vLLM holds is running there. A request's KV blocks are keyed with the weights that
it began with (`cache_salt`), so no later request finds a block of other weights. Which weights sampled a token is what
vLLM says, on the last chunk of a stream: tokens that come after a load in flight are held back until then. So are those
of a request with a grammar: a server cannot take it up in the middle, so a stream of it that ends early begins anew.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from forge.rollout.engine import Delta, EngineDied, EngineError, EngineRequest, EngineStats, FinishReason
from forge.rollout.requests import check_request
from forge.rollout.vllm.client import Broken, Chunk, Client, body_of
from forge.rollout.vllm.headers import check_same, tensors
from forge.rollout.vllm.server import served_folder

#: A step returns after this long at the latest, so that its owner can take messages.
STEP_S = 0.02
#: streams of one request that may break, before the server is taken for dead
MOST_BREAKS = 3

logger = logging.getLogger(__name__)


class Serving(Protocol):
    """What the engine needs of its server."""

    url: str

    @property
    def lives(self) -> bool: ...

    def died(self, why: str) -> EngineDied:
        """End what is left of it, and say how it ended."""
        ...

    def stop(self) -> None: ...


@dataclass(slots=True)
class _Job:
    """A request, and its present stream at the server: it may take several to end it.

    `sampled` were handed out; of them `before` came from earlier streams. `held` is what the present one brought since
    other weights were loaded under it, or with a grammar all of it.
    """

    request: EngineRequest
    streams: int = 0
    breaks: int = 0  # streams of it that broke
    sampled: list[int] = field(default_factory=list)
    before: int = 0
    version: int = 0  # of the weights that its present stream began with
    crossed: bool = False
    held: list[Chunk] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.request.id}~{self.streams}"

    @property
    def has_begun(self) -> bool:
        """Its present stream brought tokens; one that did not may begin anew with other weights, and nobody saw it."""
        return len(self.sampled) > self.before or bool(self.held)


class VllmEngine:
    """An `Engine` over HTTP. A step returns whatever came since the last one, several tokens a request at times.

    `stats.steps` counts steps that brought tokens. Draws are vLLM's own: a request without a seed repeats for no
    `seed` of ours, and one with a seed repeats on this server alone.
    """

    def __init__(
        self, server: Serving, model: Path, scratch: Path, *, slots: int, max_context: int, version: int = 0
    ) -> None:
        """`model` is the folder it serves, its server is up. `scratch`: for links to the weights it loads."""
        self._server = server
        self._scratch = scratch
        self._client = Client(server.url)
        self._tensors = tensors(model)
        self._vocab_size = int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])
        self.slots = slots
        self.max_context = max_context
        self.version = version
        self._loads = 0
        self._queue: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}  # by request id, in the order of admission
        self._cancelled: set[str] = set()
        self.stats = EngineStats()
        self._control("update_weight_version", {"new_version": str(version)})

    @property
    def load_in_flight(self) -> tuple[int, int]:
        return len(self._running), len(self._queue)

    def add(self, request: EngineRequest) -> None:
        if request.id in self._running or any(job.request.id == request.id for job in self._queue):
            raise EngineError(f"request {request.id!r} is already in flight")
        check_request(request, vocab_size=self._vocab_size, max_context=self.max_context)
        self._queue.append(_Job(request))

    def cancel(self, request_id: str) -> None:
        if request_id in self._running or any(job.request.id == request_id for job in self._queue):
            self._cancelled.add(request_id)

    def step(self) -> list[Delta]:
        if not self._running and not self._queue:
            return []
        began = time.perf_counter()
        deltas = self._end_cancelled()
        self._admit()
        if self._running:
            deltas += self._gather(0.0 if deltas else STEP_S)
            self.stats.busy_s += time.perf_counter() - began
        return deltas

    def close(self) -> None:
        self._client.close()
        self._server.stop()

    # --- weights ------

    def load(self, weights: Path | None, version: int, *, recompute: bool = False) -> None:
        """In flight the server pauses, takes the weights, and goes on with the KV it has."""
        folder = None if weights is None else self._checked(Path(weights))
        self._control("pause?mode=keep")
        if folder is not None:
            self._control("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._control("update_weight_version", {"new_version": str(version)})
        self.version = version
        self._loads += 1
        for job in self._running.values():
            if recompute or not job.has_begun:
                self._client.hang_up(job.key)
            else:
                job.crossed = True
        self._control("resume")
        for job in self._running.values():
            if recompute or not job.crossed:
                self._open(job)

    def _checked(self, weights: Path) -> Path:
        """The folder that the server is to read. Raises EngineError where it is not the served model's."""
        folder = served_folder(weights, self._scratch)
        check_same(self._tensors, folder)
        return folder

    def _control(self, path: str, body: dict[str, object] | None = None) -> None:
        """A server that fails at it may hold half of the weights, or stay paused: it is given up."""
        try:
            self._client.post(f"/{path}", body)
        except httpx.HTTPError as error:
            raise self._server.died(f"{path}: {type(error).__name__}: {error}") from None

    # --- requests ------

    def _end_cancelled(self) -> list[Delta]:
        for request_id in self._cancelled:
            if job := self._running.pop(request_id, None):
                self._client.hang_up(job.key)
        self._queue = deque(job for job in self._queue if job.request.id not in self._cancelled)
        deltas = [Delta(id=request_id, finish="cancelled") for request_id in sorted(self._cancelled)]
        self._cancelled.clear()
        return deltas

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.slots:
            job = self._queue.popleft()
            self._running[job.request.id] = job
            self._open(job)

    def _open(self, job: _Job) -> None:
        """A new stream, which goes on after what was handed out; nobody saw the rest of an earlier one."""
        job.streams += 1
        job.before, job.version, job.crossed, job.held = len(job.sampled), self.version, False, []
        request = job.request
        size = len(request.prompt_ids) + job.before
        most = min(request.sampling.max_tokens - job.before, self.max_context - size)
        salt = f"{self.version}.{self._loads}"
        self._client.open(job.key, body_of(request, tuple(job.sampled), most, salt, job.key))

    def _gather(self, timeout_s: float) -> list[Delta]:
        deltas = []
        for news in self._client.news(timeout_s):
            job = self._running.get(news.key.rpartition("~")[0])
            if job is None or job.key != news.key:
                continue  # of a stream that was hung up
            if isinstance(news, Broken):
                self._mend(job, news)
            else:
                deltas += self._take(job, news)
        if not deltas and not self._server.lives:
            raise self._server.died("its process ended")
        self.stats.steps += bool(deltas)
        self.stats.decode_tokens += sum(len(delta.token_ids) for delta in deltas)
        return deltas

    def _mend(self, job: _Job, broken: Broken) -> None:
        """A stream that broke under a healthy server is begun anew: what it had not handed out, nobody saw."""
        if broken.refused and self._server.lives:
            raise EngineError(f"vLLM refused request {job.request.id!r}: {broken.why}")
        job.breaks += 1
        if job.breaks > MOST_BREAKS or not self._server.lives or not self._client.is_healthy():
            raise self._server.died(broken.why)
        logger.warning("vLLM: stream %s broke (%s); begun anew", job.key, broken.why)
        self._open(job)

    def _take(self, job: _Job, chunk: Chunk) -> list[Delta]:
        """What may be handed out now that this chunk came."""
        job.held.append(chunk)
        if chunk.finish is None and (job.crossed or job.request.sampling.grammar is not None):
            return []
        ids = tuple(token for one in job.held for token in one.token_ids)
        logprobs = tuple(p for one in job.held for p in one.logprobs)
        versions = (job.version,) * len(ids) if chunk.finish is None else self._versions(job, chunk, len(ids))
        if len(logprobs) != len(ids):
            raise self._server.died(f"{len(ids)} tokens came with {len(logprobs)} logprobs")
        job.held = []
        job.sampled += ids
        finish = None if chunk.finish is None else self._end(job, chunk)
        return [Delta(id=job.request.id, token_ids=ids, logprobs=logprobs, versions=versions, finish=finish)]

    def _versions(self, job: _Job, chunk: Chunk, count: int) -> tuple[int, ...]:
        """Of the last `count` tokens of a stream, by its spans; what was handed out must agree with them."""
        spans = [int(span.version) for span in chunk.spans for _ in range(span.start, span.end)]
        known = len(job.sampled) - job.before
        if len(spans) != known + count or any(version != job.version for version in spans[:known]):
            raise self._server.died(f"{known} tokens were handed out as of version {job.version}; spans {chunk.spans}")
        return tuple(spans[known:])

    def _end(self, job: _Job, chunk: Chunk) -> FinishReason:
        del self._running[job.request.id]
        self._cancelled.discard(job.request.id)
        self.stats.cached_tokens += chunk.cached_tokens
        self.stats.prefill_tokens += len(job.request.prompt_ids) + job.before - chunk.cached_tokens
        if chunk.finish == "stop":
            return "stop"
        if chunk.finish == "length":
            return "length"
        raise self._server.died(f"a request ended with {chunk.finish!r}")
