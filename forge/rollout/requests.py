"""What every engine does with a request before a model is involved: check it, seed it, draw for it. No torch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from forge.rollout.engine import EngineError, EngineRequest, EngineStats, Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


def check_request(request: EngineRequest, *, vocab_size: int, max_context: int, knows_grammars: bool = True) -> None:
    """Raise EngineError, naming value and limit, for a request no engine with these limits can serve."""
    if request.sampling.grammar is not None and not knows_grammars:
        raise EngineError(f"request {request.id!r}: a grammar, which this engine does not know")
    prompt = request.prompt_ids
    if not prompt:
        raise EngineError(f"request {request.id!r}: the prompt is empty")
    if len(prompt) >= max_context:
        raise EngineError(
            f"request {request.id!r}: prompt of {len(prompt)} tokens leaves no room in max_context {max_context}"
        )
    for name, ids in (("prompt", prompt), ("stop", request.sampling.stop_ids)):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            raise EngineError(f"request {request.id!r}: {name} id {bad} is outside the vocabulary [0, {vocab_size})")
    _check_sampling(request.id, request.sampling)


def _check_sampling(request_id: str, sampling: Sampling) -> None:
    if sampling.max_tokens < 1:
        raise EngineError(f"request {request_id!r}: max_tokens {sampling.max_tokens} is below 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise EngineError(f"request {request_id!r}: temperature {sampling.temperature} is not a number >= 0")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"request {request_id!r}: top_p {sampling.top_p} is outside (0, 1]")


def request_key(seed: int | None, engine_seed: int, ordinal: int) -> int:
    """The 64-bit key of a request's draws: from its own seed, or from the engine's seed and the request's ordinal."""
    if seed is not None:
        return _mix_int(seed & _MASK)
    return _mix_int(_mix_int(engine_seed & _MASK) ^ ((ordinal * int(_GOLDEN)) & _MASK))


def draws(keys: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1): draw number `index[i]` of the request with key `keys[i]`.

    Counter-based (splitmix64), so a token's draw depends on its request and its index alone: not on the batch, not
    on the order of steps, and no generator object per request has to be kept.
    """
    state = keys + (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_int(value: int) -> int:
    """Splitmix64's finaliser: neighbouring seeds give unrelated keys."""
    value = (value + int(_GOLDEN)) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def record_step(stats: EngineStats, *, prefilled: int, sampled: int, seconds: float) -> None:
    """Add one step to the counters: `prefilled` prompt tokens computed, `sampled` tokens emitted."""
    stats.busy_s += seconds
    stats.steps += 1
    stats.prefill_tokens += prefilled
    stats.decode_tokens += sampled
