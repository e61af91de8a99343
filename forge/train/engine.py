"""The train engine: CISPO steps on any Hugging Face causal LM, one process, one device.

Samples are merged into prefix forests, each distinct token forwarded once (`merge = "tree"`), or forwarded padded side
by side (`"none"`): the plain path that merging is measured against.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from forge.forest import Forest
from forge.train import checkpoint, forward, microbatch, planner
from forge.train.checkpoint import Checkpointed, CheckpointError, Position
from forge.train.cispo import RatioStats, ratio_stats
from forge.train.forward import Share
from forge.train.microbatch import MicroBatch, forward_length
from forge.train.planner import Part
from forge.train.protocol import StepMetrics
from forge.train.step import (
    OPTIMIZER_FILE,
    Gradient,
    NonFiniteGradientError,
    TrainConfig,
    adamw,
    has_signal,
    prepared,
    step_metrics,
)
from forge.train.streaming import streamed
from forge.train.tree import TreeModel
from forge.types import TrainSample


def quiet() -> None:
    """Loading and saving draw a bar per checkpoint, and import DeepSpeed where it is installed, which prints to stdout:
    both would drown the run's own output."""
    transformers_logging.disable_progress_bar()
    logging.getLogger("DeepSpeed").addFilter(lambda _: False)


class TrainEngine(Checkpointed):
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

        loss_of = forward.loss_of(micro, self.config.cispo)
        if self.tree is not None and len(micro.chunks) > 1:
            return streamed(self.tree, micro, loss_of, parameters)
        logits = forward.logits(self.model, self.tree, micro, autocast=self.config.dtype == "bfloat16")
        return forward.share(logits, micro, loss_of, parameters)

    def _micro_batches(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        kept, wanted = prepared(samples, self.config.cispo, limit)
        budget, at_least = self.config.token_budget, self.config.min_micro_batches

        def of(batch: Sequence[int], part: Part | None = None) -> MicroBatch:
            mine, theirs = [kept[j] for j in batch], [wanted[j] for j in batch]
            if part is None:
                return microbatch.padded(mine, theirs, self.device, self.dtype)
            return microbatch.merged(mine, theirs, part, self.device, self.dtype)

        if self.tree is None:
            lengths = [forward_length(sample) for sample in kept]
            return [of(batch) for batch in microbatch.plan(lengths, budget, at_least)]
        forest = Forest.of([microbatch.inputs(sample) for sample in kept])
        return [of(part.sequences, part) for part in planner.plan(forest, budget, at_least)]

    def _ratio(self, logprobs: list[Tensor], micro_batches: list[MicroBatch]) -> RatioStats | None:
        if not logprobs:
            return None
        new = torch.cat(logprobs)
        old = torch.cat([micro.rollout_logprobs for micro in micro_batches])
        return ratio_stats(new, old, _all(new), self.config.cispo)

    def close(self) -> None:
        """There is nothing to let go of."""

    def _save_files(self, folder: Path) -> None:
        # transformers' own writer: it knows each architecture's names on disk and leaves tied weights out.
        self.model.save_pretrained(folder, max_shard_size="1TB")
        checkpoint.write_companions(folder, self.companions)
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


def _variance(norms: Sequence[float], norm: float) -> float | None:
    """`StepMetrics.update_variance` from ||g_i|| of the micro-batches and ||sum g_i||."""
    m = len(norms)
    if m < 2:
        return None
    # mean ||h_i||^2 = M sum ||g_i||^2. Rounding may leave a hair below 0 where all gradients are equal.
    return max(0.0, m / (m - 1) * (m * sum(one**2 for one in norms) - norm**2))
