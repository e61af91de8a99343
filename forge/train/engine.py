"""The train engine: CISPO steps on any Hugging Face causal LM, one process, one device.

Samples are merged into prefix forests, each distinct token forwarded once (`merge = "tree"`), or forwarded padded side
by side (`"none"`): the plain path that merging is measured against.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forge.forest import Forest
from forge.train import checkpoint, forward, microbatch, planner
from forge.train.attention import Backend
from forge.train.checkpoint import CheckpointError, Position
from forge.train.cispo import CispoConfig, RatioStats, cispo_loss, denominators, ratio_stats
from forge.train.forward import Share
from forge.train.microbatch import MicroBatch, forward_length
from forge.train.planner import Part
from forge.train.streaming import streamed
from forge.train.tree import TreeModel
from forge.types import Json, TrainSample

OPTIMIZER_FILE = "optimizer.safetensors"


def quiet() -> None:
    """Loading and saving draw a bar per checkpoint, and import DeepSpeed where it is installed, which prints to stdout:
    both would drown the run's own output."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda _: False)


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
class StepMetrics:
    """One optimiser step. Counts ending in `tokens` and `samples` are of the whole batch unless said otherwise.

    `skipped_samples` had only zero advantages and were not forwarded. The others have `flat_tokens` in all, of which
    `forward_tokens` were forwarded, and `padded_tokens` with padding. `ratio`, `entropy` (mean nats) are over the
    forwarded loss tokens before the update; None if there were none. `grad_norm` is before clipping. `seconds` is wall
    time.

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
    flat_tokens: int
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
    flat_tokens: int
    forward_tokens: int
    padded_tokens: int
    ratio: RatioStats | None
    entropy: float | None


class TrainEngine:
    """Holds the model, the optimiser and the count of steps taken. `model` is public: publishers read its weights."""

    def __init__(self, model_dir: Path, config: TrainConfig) -> None:
        quiet()
        self.config = config
        self.companions = checkpoint.companions(model_dir)
        self.device = torch.device(config.device)
        self.dtype = torch.float64 if config.dtype == "float64" else torch.float32
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self.dtype, attn_implementation="sdpa", local_files_only=True
        )
        # eval(): dropout would make the trainer's policy another one than the rollout's. Gradients flow all the same.
        self.model: Any = model.to(self.device).eval()
        autocast = config.dtype == "bfloat16"
        self.tree = TreeModel(self.model, config.attention, autocast=autocast) if config.merge == "tree" else None
        # Tied weights once, frozen ones not at all.
        self.parameters: dict[str, Tensor] = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = adamw(self.parameters.values(), config, self.device)
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
        return step_metrics(self.steps, samples, gradient, time.perf_counter() - start)

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
            one = self._share(micro, values)
            for into, grad in zip(total, one.grads, strict=True):
                into.add_(grad)
            losses.append(one.loss)
            norms.append(get_total_norm(one.grads))
            logprobs.append(one.logprobs)
            entropies.append(one.entropies)
        for value, into in zip(values, total, strict=True):
            value.grad = into
        norm = float(get_total_norm(total))
        return Gradient(
            loss=float(sum(losses)),
            norm=norm,
            variance=_variance([float(one) for one in norms], norm),
            micro_batches=len(micro_batches),
            flat_tokens=sum(forward_length(sample) for sample in samples if has_signal(sample)),
            forward_tokens=sum(micro.tokens for micro in micro_batches),
            padded_tokens=sum(micro.input_ids.numel() for micro in micro_batches),
            ratio=self._ratio(logprobs, micro_batches),
            entropy=float(torch.cat(entropies).mean()) if entropies else None,
        )

    def _share(self, micro: MicroBatch, parameters: Sequence[Tensor]) -> Share:
        """The micro-batch's share of the batch loss and gradient."""

        def loss_of(new: Tensor) -> Tensor:
            return cispo_loss(
                new, micro.rollout_logprobs, micro.advantages, _all(new), micro.denominator, self.config.cispo
            )

        if self.tree is None:
            autocast = self.config.dtype == "bfloat16"
            return forward.padded(self.model, micro, loss_of, parameters, autocast=autocast)
        if len(micro.chunks) > 1:
            return streamed(self.tree, micro, loss_of, parameters)
        return forward.merged(self.tree, micro, loss_of, parameters)

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        kept, wanted = prepared(samples, self.config.cispo, limit)
        lengths = [forward_length(sample) for sample in kept]
        budget, at_least = self.config.token_budget, self.config.min_micro_batches

        def of(batch: Sequence[int], part: Part | None = None) -> MicroBatch:
            mine, theirs = [kept[j] for j in batch], [wanted[j] for j in batch]
            if part is None:
                return microbatch.padded(mine, theirs, self.device, self.dtype)
            return microbatch.merged(mine, theirs, part, self.device, self.dtype)

        if self.tree is None:
            return [of(batch) for batch in microbatch.plan(lengths, budget, at_least)]
        forest = Forest.of([microbatch.inputs(sample) for sample in kept])
        return [of(part.sequences, part) for part in planner.plan(forest, budget, at_least)]

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

    def close(self) -> None:
        """There is nothing to let go of."""

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


def _all(like: Tensor) -> Tensor:
    """The mask of flat loss tokens: every one counts, padding was never gathered."""
    return torch.ones_like(like, dtype=torch.bool)


def has_signal(sample: TrainSample) -> bool:
    return any(on and advantage != 0.0 for on, advantage in zip(sample.loss, sample.advantages, strict=True))


def _variance(norms: Sequence[float], norm: float) -> float | None:
    """`StepMetrics.update_variance` from ||g_i|| of the micro-batches and ||sum g_i||."""
    m = len(norms)
    if m < 2:
        return None
    # mean ||h_i||^2 = M sum ||g_i||^2. Rounding may leave a hair below 0 where all gradients are equal.
    return max(0.0, m / (m - 1) * (m * sum(one**2 for one in norms) - norm**2))
