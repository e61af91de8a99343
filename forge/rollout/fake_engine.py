"""A deterministic engine without a model or torch: for tests of the gateway and the pool, and for dry runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forge.rollout.engine import Delta, EngineError, EngineRequest, EngineStats, FinishReason
from forge.rollout.requests import check_request, draws, record_step, request_key

#: `(prompt ids, tokens generated so far, a draw in [0, 1)) -> next token id`.
Script = Callable[[tuple[int, ...], int, float], int]

#: `(prompt ids, tokens generated so far, token) -> its log probability`.
LogprobScript = Callable[[tuple[int, ...], int, int], float]


@dataclass(slots=True)
class _Job:
    """A request on its way. `scripted` is its whole completion where the script is a list."""

    request: EngineRequest
    key: int
    scripted: tuple[int, ...] | None
    generated: int = 0

    @property
    def size(self) -> int:
        """Tokens of prompt and completion so far."""
        return len(self.request.prompt_ids) + self.generated


class FakeEngine:
    """An `Engine` that says what a script tells it to, one token per running request and step.

    `script` is a function of prompt, index and draw, or a list of completions: request number i since the start
    gets number i, round and round, and ends with "stop" after its last token; None draws evenly from the
    vocabulary. `logprob` is a constant or a function.
    The clock is `step_s` seconds per step, counted and not slept. Weights are a label: `load` checks that the
    folder holds safetensors and takes the version.
    """

    def __init__(
        self,
        script: Script | Sequence[Sequence[int]] | None = None,
        *,
        slots: int = 8,
        max_context: int = 4096,
        vocab_size: int = 256,
        logprob: float | LogprobScript = -1.0,
        step_s: float = 0.0,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        if slots < 1 or max_context < 2:
            raise EngineError(f"slots {slots}, max_context {max_context}: too small")
        if script is None:
            script = self._evenly
        if not callable(script) and not (script and all(script)):
            raise EngineError("the script holds no completion, or an empty one")
        self._script = script
        self._logprob = logprob
        self.slots = slots
        self.max_context = max_context
        self._vocab_size = vocab_size
        self._step_s = step_s
        self._seed = seed
        self.version = version
        self._jobs: dict[str, _Job] = {}
        self._queue: deque[str] = deque()
        self._running: list[str] = []
        self._cancelled: set[str] = set()
        self._added = 0
        self._recompute = 0  # tokens whose KV a model would compute anew in the next step
        self.stats = EngineStats()

    @property
    def load_in_flight(self) -> tuple[int, int]:
        return len(self._running), len(self._queue)

    def add(self, request: EngineRequest) -> None:
        if request.id in self._jobs:
            raise EngineError(f"request {request.id!r} is already in flight")
        check_request(request, vocab_size=self._vocab_size, max_context=self.max_context, knows_grammars=False)
        key = request_key(request.sampling.seed, self._seed, self._added)
        scripted = None if callable(self._script) else tuple(self._script[self._added % len(self._script)])
        self._jobs[request.id] = _Job(request, key, scripted)
        self._queue.append(request.id)
        self._added += 1

    def cancel(self, request_id: str) -> None:
        if request_id in self._jobs:
            self._cancelled.add(request_id)

    def load(self, weights: Path | None, version: int, *, recompute: bool = False) -> None:
        if weights is not None and not any(Path(weights).glob("*.safetensors")):
            raise EngineError(f"{weights}: no safetensors file there")
        self.version = version
        if recompute:
            self._recompute = sum(self._jobs[job].size for job in self._running)

    def step(self) -> list[Delta]:
        if not self._jobs:
            return []
        deltas = self._end_cancelled()
        prefilled = self._recompute + self._admit()
        self._recompute = 0
        sampled = [self._advance(self._jobs[job]) for job in self._running]
        for delta in sampled:
            if delta.finish is not None:
                del self._jobs[delta.id]
        self._running = [job for job in self._running if job in self._jobs]
        record_step(self.stats, prefilled=prefilled, sampled=len(sampled), seconds=self._step_s)
        return deltas + sampled

    def _end_cancelled(self) -> list[Delta]:
        ended = sorted(self._cancelled)
        for job in ended:
            del self._jobs[job]
        self._cancelled.clear()
        self._running = [job for job in self._running if job in self._jobs]
        self._queue = deque(job for job in self._queue if job in self._jobs)
        return [Delta(id=job, finish="cancelled") for job in ended]

    def _admit(self) -> int:
        """Start queued requests while slots are free; returns their prompt tokens."""
        admitted = [self._queue.popleft() for _ in range(min(len(self._queue), self.slots - len(self._running)))]
        self._running += admitted
        return sum(len(self._jobs[job].request.prompt_ids) for job in admitted)

    def _advance(self, job: _Job) -> Delta:
        request, index = job.request, job.generated
        token = self._token(job)
        if not 0 <= token < self._vocab_size:
            raise EngineError(f"the script gave id {token}, outside the vocabulary [0, {self._vocab_size})")
        job.generated += 1
        logprob = self._logprob(request.prompt_ids, index, token) if callable(self._logprob) else self._logprob
        return Delta(
            id=request.id,
            token_ids=(token,),
            logprobs=(logprob,),
            versions=(self.version,),
            finish=self._finish(job, token),
        )

    def _evenly(self, prompt_ids: tuple[int, ...], index: int, draw: float) -> int:  # noqa: ARG002 - a Script
        return int(draw * self._vocab_size)

    def _token(self, job: _Job) -> int:
        if job.scripted is not None:
            return job.scripted[job.generated]
        assert callable(self._script)
        draw = draws(np.array([job.key], np.uint64), np.array([job.generated], np.int64))
        return self._script(job.request.prompt_ids, job.generated, float(draw[0]))

    def _finish(self, job: _Job, token: int) -> FinishReason | None:
        sampling = job.request.sampling
        if token in sampling.stop_ids or (job.scripted is not None and job.generated == len(job.scripted)):
            return "stop"
        return "length" if job.generated == sampling.max_tokens or job.size == self.max_context else None
