"""What the trainer and its ranks send each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forge.train.zero.portions import Portion

if TYPE_CHECKING:
    from forge.train.step import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message to a rank, answered by "ready". `optimizer`: the file to take the optimiser's state from;
    None for a fresh one."""

    model_dir: Path
    config: TrainConfig
    stage: int
    optimizer: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One optimiser step, answered by Seen. `rounds` is the same for all ranks."""

    portion: Portion
    rounds: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Weights and optimiser state into `folder`, answered by "saved"."""

    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The answer of a rank that then ends. Of a fault of ours, `text` is the traceback."""

    text: str
    is_user_error: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a rank saw in a step: its share of the loss; the batch's gradient norm before clipping, not finite if no
    update was made; of its loss tokens logprobs, those of the rollout, and entropies, [N] in nats."""

    loss: float
    norm: float
    micro_batches: int
    forward_tokens: int
    padded_tokens: int
    logprobs: np.ndarray
    rollout_logprobs: np.ndarray
    entropies: np.ndarray
