"""The train engine: CISPO steps on any Hugging Face causal LM, one process, one device.

Every sample is forwarded on its own (padded, no prefix sharing): the plain path that tree merging is measured against.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forge.train import checkpoint
from forge.train.checkpoint import CheckpointError, Position
from forge.train.cispo import CispoConfig, RatioStats, cispo_loss, denominators, ratio_stats
from forge.train.forward import token_logprobs
from forge.train.microbatch import MicroBatch, build, forward_length, plan
from forge.types import Json, TrainSample

OPTIMIZER_FILE = "optimizer.safetensors"


class NonFiniteGradientError(ArithmeticError):
    """The gradient has a NaN or an infinity. Weights and optimiser state are as before the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Learning rate, betas and clipping are those of LEARNING.md's recipe.

    `token_budget` bounds the padded tokens of a micro-batch and with them memory: the logits of its loss tokens alone
    are (loss tokens x vocabulary). A learning rate of 0 measures without training. `dtype` "bfloat16" keeps fp32
    weights and optimiser state and computes under autocast, which pays on a GPU and is ten times slower than float32
    on a CPU. `attention` is transformers' name.
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
    attention: str = "sdpa"

    def __post_init__(self) -> None:
        if not self.learning_rate >= 0:
            raise ValueError(f"train.learning_rate = {self.learning_rate}: must not be negative")
        for name in ("max_grad_norm", "token_budget", "min_micro_batches"):
            if not getattr(self, name) > 0:
                raise ValueError(f"train.{name} = {getattr(self, name)}: must be positive")
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise ValueError(f"train.dtype = {self.dtype!r}: must be 'float32', 'float64' or 'bfloat16'")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimiser step. Counts ending in `tokens` and `samples` are of the whole batch unless said otherwise.

    `skipped_samples` had only zero advantages and were not forwarded; `forward_tokens` were, without padding, and
    `padded_tokens` with it. `ratio`, `entropy` (mean nats) are over the forwarded loss tokens before the update; None
    if there were none. `grad_norm` is before clipping. `seconds` is wall time.

    `update_variance` is the trace of the unbiased covariance of the micro-batch gradients, each scaled to estimate
    the batch gradient: with h_i = M g_i, mean h = G = sum g_i, it is `M/(M-1) * (mean ||h_i||^2 - ||G||^2)`. None for
    M < 2. It falls as micro-batches grow; divided by `micro_batches` it estimates the variance of G itself. The
    micro-batches are sorted by length, hence not exchangeable: differences between long and short samples count too.
    """

    step: int
    loss: float
    grad_norm: float
    update_variance: float | None
    micro_batches: int
    samples: int
    skipped_samples: int
    tokens: int
    loss_tokens: int
    forward_tokens: int
    padded_tokens: int
    ratio: RatioStats | None
    entropy: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of a batch, left in `.grad`, and what was seen on the way."""

    loss: float
    norm: float
    variance: float | None
    micro_batches: int
    forward_tokens: int
    padded_tokens: int
    ratio: RatioStats | None
    entropy: float | None


class TrainEngine:
    """Holds the model, the optimiser and the count of steps taken. `model` is public: publishers read its weights."""

    def __init__(self, model_dir: Path, config: TrainConfig) -> None:
        transformers_logging.disable_progress_bar()  # a bar per checkpoint would drown the run's own output
        self.config = config
        self.companions = checkpoint.companions(model_dir)
        self.device = torch.device(config.device)
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self.dtype, attn_implementation=config.attention, local_files_only=True
        )
        # eval(): dropout would make the trainer's policy another one than the rollout's. Gradients flow all the same.
        self.model: Any = model.to(self.device).eval()
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())  # tied weights once
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),  # five times faster than foreach for a small model on a CPU
        )
        self.steps = 0

    def step(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """One optimiser update on the whole batch; EmptyBatchError and NonFiniteGradientError leave all as it was.

        A batch of nothing but zero advantages still takes its step, with a zero gradient: skipping samples must never
        change the result, and momentum goes on.
        """
        start = time.perf_counter()
        gradient = self.gradient(samples)
        values = list(self.parameters.values())
        if not math.isfinite(gradient.norm):
            raise NonFiniteGradientError(f"gradient norm is {gradient.norm} at step {self.steps}; no update was made")
        clip_grads_with_norm_(values, self.config.max_grad_norm, torch.tensor(gradient.norm, device=self.device))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return StepMetrics(
            step=self.steps,
            loss=gradient.loss,
            grad_norm=gradient.norm,
            update_variance=gradient.variance,
            micro_batches=gradient.micro_batches,
            samples=len(samples),
            skipped_samples=sum(not _has_signal(sample) for sample in samples),
            tokens=sum(len(sample.token_ids) for sample in samples),
            loss_tokens=sum(sum(sample.loss) for sample in samples),
            forward_tokens=gradient.forward_tokens,
            padded_tokens=gradient.padded_tokens,
            ratio=gradient.ratio,
            entropy=gradient.entropy,
            seconds=time.perf_counter() - start,
        )

    def gradient(self, samples: Sequence[TrainSample]) -> Gradient:
        """Leave the batch's gradient in `.grad` of every parameter, without an update.

        Samples whose every advantage is zero have no gradient: they are not forwarded, but their loss tokens stay in
        the denominator, as if they had been.
        """
        micro_batches = self._micro_batches(samples)
        values = list(self.parameters.values())
        total = [torch.zeros_like(value) for value in values]
        # Figures stay tensors until the end: reading one would make a GPU wait for every micro-batch.
        losses, norms, logprobs, entropies = [], [], [], []
        for micro in micro_batches:
            loss, new, entropy = self._loss(micro)
            # autograd.grad and not backward(): each micro-batch's own norm is needed before they are summed.
            grads = torch.autograd.grad(loss, values, materialize_grads=True)
            for into, grad in zip(total, grads, strict=True):
                into.add_(grad)
            losses.append(loss.detach())
            norms.append(get_total_norm(grads))
            logprobs.append(new.detach())
            entropies.append(entropy)
        for value, into in zip(values, total, strict=True):
            value.grad = into
        norm = float(get_total_norm(total))
        return Gradient(
            loss=float(sum(losses)),
            norm=norm,
            variance=_variance([float(one) for one in norms], norm),
            micro_batches=len(micro_batches),
            forward_tokens=sum(micro.tokens for micro in micro_batches),
            padded_tokens=sum(micro.input_ids.numel() for micro in micro_batches),
            ratio=self._ratio(logprobs, micro_batches),
            entropy=float(torch.cat(entropies).mean()) if entropies else None,
        )

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The micro-batch's share of the batch loss; logprobs and entropies [N] of its loss tokens."""
        new, entropy = token_logprobs(self.model, micro, self.dtype, self.config.dtype == "bfloat16")
        loss = cispo_loss(
            new, micro.rollout_logprobs, micro.advantages, _all(new), micro.denominator, self.config.cispo
        )
        return loss, new, entropy

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        divisors = denominators(
            [sum(sample.loss) for sample in samples],
            [sample.position for sample in samples],
            self.config.cispo.normalise,
        )
        chosen = [i for i, sample in enumerate(samples) if _has_signal(sample)]
        lengths = [forward_length(samples[i]) for i in chosen]
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit is not None and lengths and max(lengths) > limit:
            raise ValueError(f"a sample of {max(lengths)} tokens exceeds the model's max_position_embeddings {limit}")
        return [
            build([samples[chosen[j]] for j in batch], [divisors[chosen[j]] for j in batch], self.device, self.dtype)
            for batch in plan(lengths, self.config.token_budget, self.config.min_micro_batches)
        ]

    def _ratio(self, logprobs: list[Tensor], micro_batches: list[MicroBatch]) -> RatioStats | None:
        if not logprobs:
            return None
        new = torch.cat(logprobs)
        old = torch.cat([micro.rollout_logprobs for micro in micro_batches])
        return ratio_stats(new, old, _all(new), self.config.cispo)

    def save(
        self,
        root: Path,
        *,
        version: int,
        positions: Sequence[int],
        keep: int = 3,
        state: Json | None = None,
        step: int | None = None,
    ) -> Path:
        """Commit a checkpoint (`checkpoint.write`). Its folder is a model folder too.

        `step` is the trainer step it ends, where one such takes several optimiser steps; None: `self.steps`.
        """
        number = self.steps if step is None else step
        position = Position(step=number, version=version, positions=tuple(positions), state=state or {})
        return checkpoint.write(root, position, self._save_files, keep=keep)

    def _save_files(self, folder: Path) -> None:
        # transformers' own writer: it knows each architecture's names on disk and leaves tied weights out.
        self.model.save_pretrained(folder, max_shard_size="1TB")
        for name, content in self.companions.items():
            if not (folder / name).exists():
                (folder / name).write_bytes(content)
        tensors = {
            f"{name}/{key}": value.contiguous()
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        save_file(tensors, folder / OPTIMIZER_FILE)

    @classmethod
    def resume(cls, folder: Path, config: TrainConfig) -> tuple[TrainEngine, Position]:
        """The engine as it was when it saved checkpoint `folder`: its next step is the same bit for bit.

        Raises CheckpointError if the folder is not whole. The configuration is the caller's and may differ.
        """
        position = checkpoint.read(folder)
        engine = cls(folder, config)
        engine.steps = position.step
        for key, value in load_file(folder / OPTIMIZER_FILE, device=config.device).items():
            name, _, field_name = key.rpartition("/")
            if name not in engine.parameters:
                raise CheckpointError(f"{folder / OPTIMIZER_FILE} has state for {name!r}, which the model lacks")
            engine.optimizer.state[engine.parameters[name]][field_name] = value
        return engine, position


def _all(like: Tensor) -> Tensor:
    """The mask of flat loss tokens: every one counts, padding was never gathered."""
    return torch.ones_like(like, dtype=torch.bool)


def _has_signal(sample: TrainSample) -> bool:
    return any(on and advantage != 0.0 for on, advantage in zip(sample.loss, sample.advantages, strict=True))


def _variance(norms: Sequence[float], norm: float) -> float | None:
    """`StepMetrics.update_variance` from ||g_i|| of the micro-batches and ||sum g_i||."""
    m = len(norms)
    if m < 2:
        return None
    # mean ||h_i||^2 = M sum ||g_i||^2. Rounding may leave a hair below 0 where all gradients are equal.
    return max(0.0, m / (m - 1) * (m * sum(one**2 for one in norms) - norm**2))
