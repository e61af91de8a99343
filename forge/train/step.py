"""What every train engine is told and tells of one optimiser step: its configuration, samples, gradient, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forge.train.attention import Backend
from forge.train.cispo import CispoConfig, RatioStats, denominators
from forge.train.microbatch import forward_length
from forge.train.protocol import StepMetrics
from forge.types import TrainSample

OPTIMIZER_FILE = "optimizer.safetensors"


class NonFiniteGradientError(ArithmeticError):
    """The gradient has a NaN or an infinity. Weights and optimiser state are as before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The defaults are those with which a small model learns in minutes (`scenarios/quickstart.toml`).

    `token_budget` bounds the tokens (distinct if merged, else padded) forwarded at once and with them memory: the
    logits of the loss tokens alone are (loss tokens x vocabulary). Merged samples may be longer: they are streamed. A
    learning rate of 0 measures without training. `dtype` "bfloat16" keeps fp32 weights and optimiser state and computes
    under autocast, which pays on a GPU and is ten times slower than float32 on a CPU. `attention` is the backend of
    merged attention; padded samples use transformers' "sdpa".
    """

    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    token_budget: int = 2048
    min_micro_batches: int = 4
    cispo: CispoConfig = field(default_factory=CispoConfig)
    device: str = "cpu"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    merge: Literal["tree", "none"] = "tree"
    attention: Backend = "auto"

    def __post_init__(self) -> None:
        if not self.learning_rate >= 0:
            raise ValueError(f"train.learning_rate = {self.learning_rate}: must not be negative")
        for name in ("max_grad_norm", "token_budget", "min_micro_batches"):
            if not getattr(self, name) > 0:
                raise ValueError(f"train.{name} = {getattr(self, name)}: must be positive")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise ValueError(f"train.dtype = {self.dtype!r}: must be 'float32', 'float64' or 'bfloat16'")
        if self.merge not in ("tree", "none"):
            raise ValueError(f"train.merge = {self.merge!r}: must be 'tree' or 'none'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of a batch, left in `.grad`, and what was seen on the way."""

    loss: float
    norm: float
    variance: float | None
    micro_batches: int
    flat_tokens: int
    forward_tokens: int
    padded_tokens: int
    ratio: RatioStats | None
    entropy: float | None


def adamw(parameters: Iterable[Tensor], config: TrainConfig, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),  # five times faster than foreach for a small model on a CPU
    )


def prepared(
    samples: Sequence[TrainSample], config: CispoConfig, limit: int | None
) -> tuple[list[TrainSample], list[float]]:
    """The samples that have a gradient, and what the loss tokens of each are divided by, from the whole batch.

    Raises EmptyBatchError, and ValueError for a sample of more tokens than `limit`, the positions the model knows.
    """
    counts, groups = [sum(sample.loss) for sample in samples], [sample.position for sample in samples]
    divisors = denominators(counts, groups, config.normalise)
    chosen = [i for i, sample in enumerate(samples) if has_signal(sample)]
    longest = max((forward_length(samples[i]) for i in chosen), default=0)
    if limit is not None and longest > limit:
        raise ValueError(f"a sample of {longest} tokens exceeds the model's max_position_embeddings {limit}")
    return [samples[i] for i in chosen], [divisors[i] for i in chosen]


def step_metrics(step: int, samples: Sequence[TrainSample], gradient: Gradient, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=gradient.loss,
        grad_norm=gradient.norm,
        update_variance=gradient.variance,
        micro_batches=gradient.micro_batches,
        samples=len(samples),
        skipped_samples=sum(not has_signal(sample) for sample in samples),
        tokens=sum(len(sample.token_ids) for sample in samples),
        loss_tokens=sum(sum(sample.loss) for sample in samples),
        flat_tokens=gradient.flat_tokens,
        forward_tokens=gradient.forward_tokens,
        padded_tokens=gradient.padded_tokens,
        ratio=gradient.ratio,
        entropy=gradient.entropy,
        seconds=seconds,
    )


def has_signal(sample: TrainSample) -> bool:
    return any(on and advantage != 0.0 for on, advantage in zip(sample.loss, sample.advantages, strict=True))
