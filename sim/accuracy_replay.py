"""Replay of real vLLM runs, request by request (`vllm_measured/*`): when each would have had its first and last token.

The engine is stepped as vLLM's scheduler works: decodes first, then running prefills, then waiting requests in order
of arrival, within a budget of tokens, of sequences and of KV; where KV runs out, the request that came last is
preempted and computed again. A few efficiencies are calibrated on every second request, and the others are scored.
"""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge.cost import CostModel, Deployment, Efficiencies, hardware, model_card
from forge.types import ForgeError, Json
from sim.robust import robust_fit, slopes_by_difference

Array = NDArray[np.float64]

FOLDER = "vllm_measured"
HARDWARE = {"RTX4090": "rtx_4090", "RTXPRO6000": "rtx_pro_6000"}
#: What is calibrated, and sigma of its log around the defaults of `Efficiencies`.
CALIBRATED = {"bandwidth": 0.1, "flops": 0.3, "attention_bandwidth": 0.2, "step_s": 0.7, "row_s": 0.7}
NOISE = 0.1  # of a log residual
STEP = 0.1  # of the forward difference, in logs: finish times are rough in the parameters at a smaller scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Seconds from the start of the run; tokens."""

    arrival_s: float
    prompt: int
    output: int
    first_s: float
    last_s: float

    @property
    def metrics(self) -> tuple[float, float, float]:
        """TTFT, TPOT, end to end."""
        return (
            self.first_s - self.arrival_s,
            (self.last_s - self.first_s) / max(1, self.output - 1),
            self.last_s - self.arrival_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run and the engine it ran on. `kv_tokens`: None where the run does not say."""

    name: str
    on: Deployment
    token_budget: int
    sequences: int
    kv_tokens: int | None
    requests: tuple[Request, ...]


@dataclass(slots=True, eq=False)
class _Slot:
    """A request in the engine. `need` tokens are to be prefilled, after a preemption those sampled before too."""

    index: int
    need: int
    left: int
    filled: int = 0
    sampled_at: int = 0


@dataclass(slots=True)
class _Engine:
    """State between iterations. `context`: KV tokens of decoding sequences; `held`: of all."""

    waiting: deque[_Slot] = field(default_factory=deque)
    prefilling: list[_Slot] = field(default_factory=list)
    decoding: dict[int, _Slot] = field(default_factory=dict)
    ends: list[tuple[int, int]] = field(default_factory=list)
    iteration: int = 0
    context: int = 0
    held: int = 0


def load(data: Path) -> list[Run]:
    """Every run below a data folder. Raises ForgeError for one that cannot be read."""
    folders = sorted(path.parent for path in (data / FOLDER).glob("*/requests.jsonl"))
    if not folders:
        raise ForgeError(f"{data / FOLDER}: no run in it; each is a folder with requests.jsonl and meta.json")
    return [_load(folder) for folder in folders]


def _load(folder: Path) -> Run:
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        rows = sorted((json.loads(line) for line in lines if line), key=lambda row: float(row["queued_ts"]))
        start = rows[0]["queued_ts"]
        requests = tuple(
            Request(
                arrival_s=row["queued_ts"] - start,
                prompt=row["input_toks"],
                output=row["output_toks"],
                first_s=row["first_token_ts"] - start,
                last_s=row["last_token_ts"] - start,
            )
            for row in rows
        )
        engine = meta["engine_kwargs"]
        card = HARDWARE.get(folder.name.split("_")[0], folder.name.split("_")[0])
        on = Deployment(
            model=model_card(engine["model"]), hardware=hardware(card), tp=int(engine["tensor_parallel_size"])
        )
        return Run(
            name=folder.name,
            on=on,
            token_budget=int(engine["max_num_batched_tokens"]),
            sequences=int(engine["max_num_seqs"]),
            kv_tokens=(meta.get("kv_cache") or {}).get("num_kv_tokens"),
            requests=requests,
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, ForgeError):
            raise
        raise ForgeError(f"{folder}: not a measured run: {type(error).__name__}: {error}") from None


def replay(run: Run, cost: CostModel) -> list[Request]:
    """The run's requests with the times that the model gives."""
    engine, now, coming = _Engine(), 0.0, 0
    capacity = run.kv_tokens if run.kv_tokens is not None else int(run.on.kv_tokens)
    if (most := max(one.prompt + one.output for one in run.requests)) > capacity:
        raise ForgeError(f"{run.name}: a request needs {most} tokens of KV, more than the engine's {capacity}")
    first, last = [0.0] * len(run.requests), [0.0] * len(run.requests)
    while True:
        while coming < len(run.requests) and run.requests[coming].arrival_s <= now:
            one = run.requests[coming]
            engine.waiting.append(_Slot(coming, one.prompt, one.output))
            coming += 1
        if not (engine.waiting or engine.prefilling or engine.decoding):
            if coming == len(run.requests):
                break
            now = run.requests[coming].arrival_s
            continue
        chunks = _plan(engine, run, capacity)
        spans = [(tokens, slot.filled) for slot, tokens in chunks]
        now += cost.iteration(len(engine.decoding), engine.context, spans)
        for index, began in _advance(engine, chunks):
            if began and not first[index]:
                first[index] = now
            last[index] = now
    return [replace(one, first_s=a, last_s=b) for one, a, b in zip(run.requests, first, last, strict=True)]


def _plan(engine: _Engine, run: Run, capacity: int) -> list[tuple[_Slot, int]]:
    """The chunks to prefill in the next iteration. An iteration that preempts admits nobody."""
    preempted = False
    while len(engine.decoding) > 1 and engine.held + len(engine.decoding) > capacity:
        _preempt(engine)
        preempted = True
    budget = run.token_budget - len(engine.decoding)
    free = capacity - engine.held - len(engine.decoding)
    chunks = []
    for slot in engine.prefilling:
        if (tokens := min(budget, free, slot.need - slot.filled)) > 0:
            chunks.append((slot, tokens))
            budget, free = budget - tokens, free - tokens
    while not preempted and engine.waiting and min(budget, free) > 0:
        if len(engine.prefilling) + len(engine.decoding) >= run.sequences:
            break
        tokens = min(budget, engine.waiting[0].need)
        if tokens > free:
            break
        slot = engine.waiting.popleft()
        engine.prefilling.append(slot)
        chunks.append((slot, tokens))
        budget, free = budget - tokens, free - tokens
    if not chunks and not engine.decoding:  # prompts that hold each other up: the last one gives way
        slot = engine.prefilling.pop()
        engine.held -= slot.filled
        engine.waiting.appendleft(_Slot(slot.index, slot.need, slot.left))
        return _plan(engine, run, capacity)
    return chunks


def _preempt(engine: _Engine) -> None:
    """The decoding request that arrived last waits again, in front, with all it had to be computed anew."""
    slot = engine.decoding.pop(max(engine.decoding))
    sampled = engine.iteration - slot.sampled_at
    engine.held -= slot.need + sampled
    engine.context -= slot.need + sampled
    # All that was sampled is prompt now, the last token too, which had no KV yet.
    engine.waiting.appendleft(_Slot(slot.index, slot.need + sampled + 1, slot.left - sampled))


def _advance(engine: _Engine, chunks: Sequence[tuple[_Slot, int]]) -> list[tuple[int, bool]]:
    """After the iteration: (request, whether it sampled its first token now) of those that began or ended."""
    engine.iteration += 1
    engine.context += len(engine.decoding)
    engine.held += len(engine.decoding)
    told = []
    while engine.ends and engine.ends[0][0] == engine.iteration:
        _, index = heapq.heappop(engine.ends)
        slot = engine.decoding.get(index)
        if slot is None or slot.sampled_at + slot.left != engine.iteration:
            continue  # preempted since
        del engine.decoding[index]
        engine.context -= slot.need + slot.left
        engine.held -= slot.need + slot.left
        told.append((index, False))
    for slot, tokens in chunks:
        slot.filled += tokens
        engine.held += tokens
        if slot.filled == slot.need:
            engine.prefilling.remove(slot)
            slot.left -= 1
            slot.sampled_at = engine.iteration
            told.append((slot.index, True))
            if slot.left > 0:
                engine.decoding[slot.index] = slot
                engine.context += slot.need
                heapq.heappush(engine.ends, (engine.iteration + slot.left, slot.index))
            else:
                engine.held -= slot.need
    return told


def calibrate(run: Run) -> CostModel:
    """Efficiencies from every second request's TTFT and TPOT; from those alone."""
    names, sigma = list(CALIBRATED), np.array(list(CALIBRATED.values()))
    base = Efficiencies()

    def model(betas: Array) -> CostModel:
        fitted = {name: getattr(base, name) * float(np.exp(b)) for name, b in zip(names, betas, strict=True)}
        return CostModel(run.on, replace(base, **fitted))

    def residuals(betas: Array) -> Array:
        pairs = zip(replay(run, model(betas))[::2], run.requests[::2], strict=True)
        logs = [np.log(np.divide(ours.metrics[:2], theirs.metrics[:2])) for ours, theirs in pairs]
        return np.concatenate(logs) / NOISE

    return model(robust_fit(residuals, slopes_by_difference(residuals, STEP), sigma, enough=1e-3))


def score(run: Run) -> Json:
    """Relative errors of mean TTFT, TPOT and end to end over the requests not calibrated on; and untuned, over all."""
    errors: Json = {"run": run.name, "requests": len(run.requests)}
    for label, cost, part in (("", calibrate(run), slice(1, None, 2)), ("untuned_", CostModel(run.on), slice(None))):
        ours, theirs = replay(run, cost)[part], run.requests[part]
        for i, metric in enumerate(("ttft", "tpot", "e2e")):
            means = [fmean(one.metrics[i] for one in side) for side in (ours, theirs)]
            errors[f"{label}{metric}_error"] = means[0] / means[1] - 1.0
    return errors
