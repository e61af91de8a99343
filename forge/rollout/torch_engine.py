"""The embedded engine: continuous batching of any Hugging Face decoder-only model in this process.

`TorchEngine.step` is the whole story: end what was cancelled, admit, forward, sample, account.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.rollout.attention import ATTENTION, check_supported
from forge.rollout.engine import Delta, EngineError, EngineRequest, EngineStats, FinishReason
from forge.rollout.grammar import Grammars, Matcher
from forge.rollout.kv_cache import SlotCache
from forge.rollout.requests import check_request, draws, record_step, request_key
from forge.rollout.sampler import sample
from forge.rollout.weights import load_weights

Rows = NDArray[np.int64]

#: What a row's request asks for, beside the tokens and lengths the cache keeps. `known`: tokens whose KV must be there
#: before the next one is sampled, at first the prompt.
_ROW = np.dtype(
    [
        ("live", np.bool_),
        ("prompt", np.int64),
        ("known", np.int64),
        ("order", np.int64),
        ("key", np.uint64),
        ("temperature", np.float32),
        ("top_p", np.float32),
    ]
)


@dataclass(frozen=True, slots=True)
class _Queued:
    request: EngineRequest
    key: int
    order: int
    matcher: Matcher | None


@dataclass(frozen=True, slots=True)
class _Running:
    """`limit` is the total of prompt and completion tokens at which the request ends with "length"."""

    id: str
    stop_ids: frozenset[int]
    limit: int
    matcher: Matcher | None

    def finish(self, token: int, total: int) -> FinishReason | None:
        if token in self.stop_ids:
            return "stop"
        return "length" if total >= self.limit else None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Prompt tokens to compute now: for each of `rows` [n] the next `counts` [n] tokens."""

    rows: Rows
    counts: Rows


class TorchEngine:
    """An `Engine` around one transformers model (Llama, Qwen, Mistral, SmolLM ... with full attention).

    `slots` requests run at once, each in its own KV row of `max_context` tokens. A step spends at most about
    `prefill_chunk` tokens, padding included, on prompts, so that long prompts do not stall running completions.
    `seed` feeds requests that bring none. Set torch's thread count yourself, once per process.
    """

    def __init__(
        self,
        model: Path | str | Any,
        *,
        slots: int = 32,
        max_context: int = 2048,
        prefill_chunk: int = 1024,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        version: int = 0,
    ) -> None:
        if min(slots, prefill_chunk) < 1 or max_context < 2:
            raise EngineError(f"slots {slots}, prefill_chunk {prefill_chunk}, max_context {max_context}: too small")
        folder = Path(model) if isinstance(model, (str, Path)) else None
        self._model = _open(model, dtype)
        config = self._model.config.get_text_config(decoder=True)
        check_supported(config, max_context)
        self._vocab_size = int(self._model.get_input_embeddings().num_embeddings)
        self._grammars = Grammars(folder, self._vocab_size)
        self.max_context = max_context
        self._prefill_chunk = prefill_chunk
        self._seed = seed
        self.version = version
        self._cache = SlotCache(
            config, slots=slots, max_context=max_context, dtype=self._model.dtype, device=self._model.device
        )
        self._rows = np.zeros(slots, dtype=_ROW)
        self._running: list[_Running | None] = [None] * slots
        self._queue: deque[_Queued] = deque()
        self._in_flight: set[str] = set()
        self._cancelled: set[str] = set()
        self._added = 0
        self.stats = EngineStats()

    @property
    def slots(self) -> int:
        return len(self._rows)

    @property
    def load_in_flight(self) -> tuple[int, int]:
        return len(self._in_flight) - len(self._queue), len(self._queue)

    def add(self, request: EngineRequest) -> None:
        if request.id in self._in_flight:
            raise EngineError(f"request {request.id!r} is already in flight")
        check_request(request, vocab_size=self._vocab_size, max_context=self.max_context)
        matcher = self._grammars.matcher(request.sampling)
        key = request_key(request.sampling.seed, self._seed, self._added)
        self._queue.append(_Queued(request, key, self._added, matcher))
        self._in_flight.add(request.id)
        self._added += 1

    def cancel(self, request_id: str) -> None:
        if request_id in self._in_flight:
            self._cancelled.add(request_id)

    def load(self, weights: Path | None, version: int, *, recompute: bool = False) -> None:
        if weights is not None:
            load_weights(self._model, Path(weights))
        self.version = version
        self._cache.forget()
        if recompute:
            live = np.flatnonzero(self._rows["live"])
            # A row that decodes knows one token more than it has KV of: the last one it sampled.
            self._rows["known"][live] = np.maximum(self._rows["known"][live], self._cache.length[live] + 1)
            self._cache.restart(live)

    @torch.inference_mode()
    def step(self) -> list[Delta]:
        if not self._in_flight:
            return []
        began = time.perf_counter()
        deltas = self._end_cancelled()
        self._admit()
        decoding = self._compact()
        chunk = self._next_chunk()
        sampled = self._advance(decoding, chunk)
        deltas += sampled
        record_step(
            self.stats,
            prefilled=int(chunk.counts.sum()),
            sampled=len(sampled),
            seconds=time.perf_counter() - began,
        )
        return deltas

    # Schedule

    def _end_cancelled(self) -> list[Delta]:
        if not self._cancelled:
            return []
        for row, running in enumerate(self._running):
            if running is not None and running.id in self._cancelled:
                self._release(row)
        self._queue = deque(queued for queued in self._queue if queued.request.id not in self._cancelled)
        self._in_flight -= self._cancelled
        deltas = [Delta(id=request_id, finish="cancelled") for request_id in sorted(self._cancelled)]
        self._cancelled.clear()
        return deltas

    def _admit(self) -> None:
        """Give free rows to the requests that waited longest."""
        while self._queue:
            free = np.flatnonzero(~self._rows["live"])
            if not free.size:
                return
            queued = self._queue.popleft()
            request, sampling = queued.request, queued.request.sampling
            prompt = np.asarray(request.prompt_ids, dtype=np.int64)
            row, reused = self._cache.claim(prompt, free)
            self.stats.cached_tokens += reused
            size = len(prompt)
            self._rows[row] = (True, size, size, queued.order, queued.key, sampling.temperature, sampling.top_p)
            limit = min(size + sampling.max_tokens, self.max_context)
            self._running[row] = _Running(request.id, frozenset(sampling.stop_ids), limit, queued.matcher)

    def _compact(self) -> Rows:
        """Move the rows that decode to the front, where a forward reads them as a view; returns 0..n-1."""
        decoding = self._rows["live"] & (self._cache.length >= self._rows["known"])
        count = int(decoding.sum())
        holes = np.flatnonzero(~decoding[:count])
        strays = np.flatnonzero(decoding[count:]) + count
        for hole, stray in zip(holes.tolist(), strays.tolist(), strict=True):
            self._cache.swap(hole, stray)
            self._rows[[hole, stray]] = self._rows[[stray, hole]]
            running = self._running
            running[hole], running[stray] = running[stray], running[hole]
        return np.arange(count)

    def _next_chunk(self) -> _Chunk:
        """The prompts to compute now: first come first served while the padded batch fits `prefill_chunk`."""
        known, length = self._rows["known"], self._cache.length
        waiting = np.flatnonzero(self._rows["live"] & (length < known))
        waiting = waiting[self._rows["order"][waiting].argsort()]
        for row in waiting.tolist():
            self.stats.cached_tokens += self._cache.borrow(row, int(known[row]))
        waiting = waiting[~self._cache.worth_waiting(waiting, known[waiting])]
        counts = np.minimum(known[waiting] - length[waiting], self._prefill_chunk)
        padded = np.maximum.accumulate(counts) * np.arange(1, len(counts) + 1)
        fits = int((padded <= self._prefill_chunk).sum())
        return _Chunk(waiting[:fits], counts[:fits])

    # Forward and account

    def _advance(self, decoding: Rows, chunk: _Chunk) -> list[Delta]:
        """Compute, and sample one token for each row decoding and each row whose prompt is now complete."""
        parts = [(decoding, np.ones_like(decoding)), (chunk.rows, chunk.counts)]
        logits = [self._logits(rows, counts) for rows, counts in parts if rows.size]
        if not logits:
            return []
        rows = np.concatenate([decoding, chunk.rows])
        lengths = self._cache.length[rows] + np.concatenate([counts for _, counts in parts])
        ends = lengths >= self._rows["known"][rows]
        asked = self._rows[rows[ends]]
        scores = torch.cat(logits)[torch.from_numpy(ends)]
        for at, row in enumerate(rows[ends].tolist()):
            if (running := self._running[row]) and running.matcher:
                forbidden = torch.from_numpy(running.matcher.forbidden(self._vocab_size))
                scores[at].masked_fill_(forbidden.to(scores.device), -torch.inf)
        ids, logprobs = sample(
            scores,
            temperature=asked["temperature"],
            top_p=asked["top_p"],
            draws=draws(asked["key"], lengths[ends] - asked["prompt"]),
        )
        if not np.isfinite(logprobs).all():
            self._cache.scrub()
            raise FloatingPointError(f"weights version {self.version} give logits that are not finite")
        self._cache.length[rows] = lengths
        return self._account(rows[ends], lengths[ends], ids, logprobs)

    def _logits(self, rows: Rows, counts: Rows) -> Tensor:
        """Run the next `counts` [n] tokens of `rows` [n]; the logits [n, vocabulary] after the last of each.

        Padding stands on the left, so that the last column is every row's last token and the model computes no
        other logits.
        """
        columns = np.arange(-int(counts.max()), 0)
        padding = columns < -counts[:, None]
        positions = np.where(padding, 0, (self._cache.length[rows] + counts)[:, None] + columns)
        mask = self._cache.plan(rows, positions, padding)
        device = mask.device
        output = self._model(
            input_ids=torch.from_numpy(self._cache.tokens[rows[:, None], positions]).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _account(self, rows: Rows, lengths: Rows, ids: NDArray[np.int64], logprobs: NDArray[np.float32]) -> list[Delta]:
        """Append the sampled tokens to their rows, free the rows that ended, and say so."""
        self._cache.tokens[rows, lengths] = ids
        deltas = []
        versions = (self.version,)
        columns = (rows.tolist(), lengths.tolist(), ids.tolist(), logprobs.tolist())
        for row, length, token, logprob in zip(*columns, strict=True):
            running = self._running[row]
            assert running is not None
            if running.matcher is not None:
                running.matcher.take(token)
            finish = running.finish(token, length + 1)
            if finish is not None:
                self._release(row)
                self._in_flight.discard(running.id)
            deltas.append(
                Delta(id=running.id, token_ids=(token,), logprobs=(logprob,), versions=versions, finish=finish)
            )
        return deltas

    def _release(self, row: int) -> None:
        """Free a row; its KV stays for a later prompt that begins with the same tokens."""
        self._running[row] = None
        self._rows["live"][row] = False
        self._cache.released[row] = self.stats.steps


def _open(model: Path | str | Any, dtype: torch.dtype | None) -> Any:
    """A model folder or a transformers model, in `dtype` (its own when None), ready to serve."""
    if isinstance(model, (str, Path)):
        if not Path(model).is_dir():
            raise EngineError(f"model folder {model} does not exist")
        kind = {"dtype": dtype} if dtype is not None else {}
        model = AutoModelForCausalLM.from_pretrained(model, local_files_only=True, **kind)
    elif dtype is not None:
        model = model.to(dtype)
    model.eval()
    model.set_attn_implementation(ATTENTION)
    return model
