"""The `Engine` protocol: token ids in, sampled token ids with logprobs out.

Everything that serves a policy model stands behind this one seam: the embedded torch engine, the deterministic
fake, vLLM. An engine knows tokens, slots and weights; it knows no chat, no trajectory, no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from forge.types import ForgeError

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample one completion. Training rollouts use temperature 1, top_p 1 (DESIGN section 2, CISPO).

    `temperature == 0` is greedy. `stop_ids` end the completion; the stop token is kept as the last sampled id,
    because the policy chose it and is trained on it. `seed` makes this request's draws repeatable whatever else
    is in the batch. `grammar`: what the completion must obey (forge.rollout.grammar); an engine that cannot see to it
    refuses the request.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    grammar: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One completion to sample. `id` is unique among the engine's requests in flight."""

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New tokens of one request after one step.

    `logprobs[i]` is the log probability of `token_ids[i]` under the distribution actually sampled (after
    temperature, grammar and top_p; under the softmax of what the grammar allows when greedy). So a trainer, which knows
    no grammar, gets the very importance ratio of its policy to what sampled the token; a token that was the only one
    allowed has log probability 0 and tells nothing of the policy. `versions[i]` is the weights version that sampled
    token i. `finish` is set on the last delta only. A cancelled request yields a last delta with no tokens.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    finish: FinishReason | None = None


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since start. Seconds are the engine's own clock around its steps; tokens are counted once each, those
    computed anew after a load once more as prefilled."""

    busy_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: Prompt tokens whose KV was reused instead of computed; not among `prefill_tokens`.
    cached_tokens: int = 0


class EngineError(ForgeError):
    """A request the engine cannot serve (too long, unknown token id); the message names the value and the limit."""


class EngineDied(RuntimeError):  # noqa: N818 - what happened
    """The engine's own process is gone, and its requests with it; a new engine may take its place."""


@runtime_checkable
class Engine(Protocol):
    """A steppable engine. Not thread-safe: one owner calls it. Time passes only inside `step`.

    Contract (tests/contract/test_engine.py runs it against every implementation of this process; an engine whose server
    is another process returns from `step` what came since the last one, several tokens a request at times, and
    raises EngineDied once that process is gone):
    - `add` queues a request or raises EngineError and changes nothing; a duplicate id in flight is an EngineError.
    - `step` advances every running request by at most one decode iteration, admits queued ones while slots are
      free, first come first served, and returns deltas. With nothing to do it returns [].
    - `cancel` of an unknown or finished id is a no-op; else the request ends with finish "cancelled" at the next step.
    - `load` swaps weights between steps; running requests go on, later tokens carry the new version. They keep their
      KV, or with `recompute` sample nothing before all of it is computed anew from their ids.
    - Same weights, request and seed give the same ids and logprobs (to 1e-4) whatever the batch around them.
    """

    @property
    def version(self) -> int: ...

    @property
    def max_context(self) -> int:
        """Largest prompt plus completion, in tokens. A completion that reaches it ends with "length"."""
        ...

    @property
    def slots(self) -> int:
        """How many requests run at once; more are queued."""
        ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def load_in_flight(self) -> tuple[int, int]:
        """(running, queued) request counts."""
        ...

    def add(self, request: EngineRequest) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> list[Delta]: ...

    def load(self, weights: Path | None, version: int, *, recompute: bool = False) -> None:
        """Serve the weights in folder `weights` (safetensors, Hugging Face names) as `version`.

        None relabels the present weights. A missing or mismatched file raises EngineError and the old weights stay.
        """
        ...


EngineFactory = Callable[[], Engine]
