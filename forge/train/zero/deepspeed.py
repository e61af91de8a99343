"""A rank's model and optimiser under DeepSpeed: built, stepped, gathered for a checkpoint, set from one.

DeepSpeed 0.19.8. Everything here but `Zero.norm` is a collective operation: all ranks call it, in the same order.
On a machine with CUDA GPUs each rank takes the one of its local number and talks through NCCL (not run so far: written
on a machine without any); elsewhere gloo.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
    safe_set_local_optimizer_state,
)
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from forge.train.checkpoint import CheckpointError
from forge.train.step import OPTIMIZER_FILE, TrainConfig, adamw
from forge.types import ForgeError, Json

#: of Adam, by parameter; "step" is one number for all
MOMENTS = ("exp_avg", "exp_avg_sq")


def join(folder: Path) -> torch.device:
    """Enter the process group of the ranks that torchrun started, which meet in `folder`. The device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device, gpus = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.cuda.device_count()
        if device.index >= gpus:
            raise ForgeError(
                f"train.ranks = {os.environ['WORLD_SIZE']}: this machine has {gpus} GPUs, and each rank needs its own; "
                f"set train.ranks={gpus}, or CUDA_VISIBLE_DEVICES='' to train on the CPU"
            )
        torch.cuda.set_device(device)
    # DeepSpeed would compile shared-memory collectives of its own on a CPU, which takes a minute and a compiler. Where
    # this table lacks an operation it does without.
    deepspeed.ops.__compatible_ops__ = {}
    backend = "gloo" if device.type == "cpu" else "nccl"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    return device


def settings(config: TrainConfig, stage: int, parameters: int) -> Json:
    """DeepSpeed's configuration. Batch sizes are obligatory and unused: Forge counts tokens, and scales nothing."""
    bucket = min(parameters, 100_000_000)  # numbers gathered or reduced at once; buffers of that size are allocated
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,  # torch's AdamW: DeepSpeed's own is compiled for minutes
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
    }


class Zero:
    """Model and optimiser, partitioned as the stage says. `model` is called like a Hugging Face model."""

    def __init__(self, model_dir: Path, config: TrainConfig, stage: int, device: torch.device) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        inner: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        self.inner = inner.to(device).eval()  # no dropout, as in `TrainEngine`
        self.parameters: dict[str, Tensor] = dict(inner.named_parameters())  # tied weights once
        optimizer = adamw(self.parameters.values(), config, device)
        size = sum(parameter.numel() for parameter in self.parameters.values())
        self.engine: Any = deepspeed.initialize(
            model=self.inner, optimizer=optimizer, config=settings(config, stage, size), dist_init_required=False
        )[0]
        self.engine.eval()
        self.model = Through(self.engine, self.inner)

    def prepare(self, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, scalar: Tensor) -> None:
        self.engine.backward(scalar, scale_wrt_gas=False)

    def step(self) -> float:
        """Update the weights; the gradient's norm before clipping. If that is not finite, nothing is changed."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm())

    def save(self, folder: Path) -> None:
        """Write weights and optimiser state into `folder` as `TrainEngine` does. Rank 0 writes; it holds all weights
        in its host memory, then all of the optimiser state."""
        weights = self._weights()
        if weights:
            self.inner.save_pretrained(folder, state_dict=weights, max_shard_size="1TB")
        weights.clear()
        state = dict(self._optimizer_state())
        if self.rank == 0:
            save_file(state, folder / OPTIMIZER_FILE)

    def load_optimizer(self, path: Path, idle: Any) -> None:
        """Take the optimiser state of a checkpoint, by whatever engine, stage and number of ranks it was written.

        DeepSpeed has no optimiser state before the first step, and links it only then: so one step is made, with a
        zero gradient (`idle()`) at a learning rate of zero, which changes no weight. Raises CheckpointError.
        """
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if not names:
                return  # saved before its first step
            self._check(path, names)
            steps = {float(file.get_tensor(f"{name}/step")) for name in self.parameters}
            if len(steps) > 1:
                raise CheckpointError(f"{path} has parameters of {sorted(steps)} steps; DeepSpeed counts one for all")
            rates = [group["lr"] for group in self.engine.optimizer.param_groups]
            self._set_rates([0.0] * len(rates))
            self.prepare(last=True)
            self.backward(idle())
            self.step()
            self._set_rates(rates)
            for name, parameter in self.parameters.items():
                for key in MOMENTS:
                    self._put(parameter, file.get_tensor(f"{name}/{key}"), key)
        (step,) = steps
        for state in self.engine.optimizer.state.values():
            state["step"].fill_(step)

    def _set_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self.engine.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _check(self, path: Path, names: set[str]) -> None:
        known = {name.rpartition("/")[0] for name in names}
        if strange := sorted(known - self.parameters.keys()):
            raise CheckpointError(f"{path} has state for {strange[0]!r}, which the model lacks")
        expected = {f"{name}/{key}" for name in self.parameters for key in (*MOMENTS, "step")}
        if missing := sorted(expected - names):
            raise CheckpointError(f"{path} lacks {missing[0]!r}")

    def _put(self, parameter: Any, value: Tensor, key: str) -> None:
        value = value.to(parameter.device, torch.float32)
        if not hasattr(parameter, "ds_id"):
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # Under ZeRO-3 the setter for whole tensors fails where their size is no multiple of the world's.
        size = parameter.ds_tensor.numel()
        padded = torch.nn.functional.pad(value.flatten(), (0, size * self.world - value.numel()))
        safe_set_local_optimizer_state(parameter, padded[self.rank * size : (self.rank + 1) * size], key)

    def _weights(self) -> dict[str, Tensor]:
        """As the model's own `state_dict`, on rank 0; empty elsewhere."""
        gathered: dict[int, Tensor] = {}
        for parameter in self.parameters.values():
            whole = safe_get_full_fp32_param(parameter)
            if self.rank == 0:
                gathered[id(parameter)] = whole.to("cpu", copy=True).contiguous()
        if self.rank != 0:
            return {}
        named = dict(self.inner.named_parameters(remove_duplicate=False))
        buffers: Mapping[str, Tensor] = {k: v for k, v in self.inner.state_dict().items() if k not in named}
        return {**buffers, **{name: gathered[id(parameter)] for name, parameter in named.items()}}

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        """By "parameter/key", on rank 0; nothing before the first step, nor on another rank."""
        state = list(self.engine.optimizer.state.values())
        if not state or MOMENTS[0] not in state[0]:
            return
        for name, parameter in self.parameters.items():
            for key in MOMENTS:
                whole = safe_get_full_optimizer_state(parameter, key)
                if self.rank == 0:
                    yield f"{name}/{key}", whole.to("cpu", copy=True).contiguous()
            if self.rank == 0:
                yield f"{name}/step", torch.tensor(float(state[0]["step"]))


class Through:
    """The model in every respect, but called through DeepSpeed's engine, which has attributes of the same names."""

    def __init__(self, engine: Any, inner: Any) -> None:
        self._engine, self._inner = engine, inner

    def __call__(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
