"""Read a folder of safetensors into a live model, all or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forge.rollout.engine import EngineError


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the tensors in `folder` (Hugging Face names) over the model's own, in place, in the model's dtype.

    Everything is read and checked before the first tensor is written, so on EngineError the model is untouched.
    """
    target = model.state_dict()
    found = _read(folder)
    unknown = sorted(found.keys() - target.keys())
    if unknown:
        raise EngineError(f"{folder}: tensor {unknown[0]!r} is not in the served model ({len(unknown)} such)")
    for name, tensor in found.items():
        if tensor.shape != target[name].shape:
            raise EngineError(
                f"{folder}: {name!r} has shape {tuple(tensor.shape)}, the model has {tuple(target[name].shape)}"
            )
    # Tied weights have several names for one storage; a file holds one of them.
    storages = {target[name].data_ptr() for name in found}
    missing = sorted(name for name, tensor in target.items() if tensor.data_ptr() not in storages)
    if missing:
        raise EngineError(f"{folder}: tensor {missing[0]!r} is missing ({len(missing)} such)")
    with torch.no_grad():
        for name, tensor in found.items():
            target[name].copy_(tensor)


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder, by name: model.safetensors, or the shards its index lists."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            shards = ["model.safetensors"]
        tensors: dict[str, Tensor] = {}
        for shard in shards:
            if not (folder / shard).is_file():
                raise EngineError(f"{folder}: {shard} is missing")
            with safe_open(folder / shard, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        if isinstance(error, EngineError):
            raise
        raise EngineError(f"{folder}: weights cannot be read: {error}") from error
    return tensors
