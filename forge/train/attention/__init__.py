"""Attention over a prefix forest: one function, several backends, all of them exact.

    attend(q, k, v, layout, scale, window) -> out

q is [1, H, Q, D], k and v are [1, H_kv, K, D] with H a multiple of H_kv, `layout` says who sees whom, `window` is the
sliding window in positions (None: none), out is [1, H, Q, D] in q's data type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from forge.train.attention import dense, flex, magi, segments, varlen
from forge.train.attention.layout import TreeLayout, above
from forge.types import ForgeError

Attend = Callable[[Tensor, Tensor, Tensor, TreeLayout, float, int | None], Tensor]
Backend = Literal["auto", "dense", "segments", "flex", "varlen", "magi"]

BACKENDS: dict[str, Attend] = {
    "dense": dense.attend,
    "segments": segments.attend,
    "flex": flex.attend,
    "varlen": varlen.attend,
    "magi": magi.attend,
}


def unavailable(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot train on this device; None where it can."""
    cuda = device.type == "cuda"
    match backend:
        case "segments":
            return None if device.type == "cpu" else "its kernel is the CPU's"
        case "flex":
            return None if cuda else "FlexAttention has no backward pass on a CPU"
        case "varlen":
            return None if cuda else "variable-length flash kernels run on GPUs only"
        case "magi":
            return None if cuda and magi.is_installed() else "MagiAttention is not installed"
    return None


def automatic(device: torch.device) -> str:
    """What `auto` means on this device."""
    return next(name for name in ("segments", "flex", "dense") if unavailable(name, device) is None)


def pick(backend: Backend, device: torch.device) -> Attend:
    """The backend of this name; `auto`: segments on a CPU, flex on a GPU, the dense reference elsewhere.

    Raises ForgeError for one that cannot train on `device`.
    """
    if backend not in get_args(Backend):
        raise ForgeError(f"train.attention = {backend!r}: must be one of {', '.join(get_args(Backend))}")
    if backend == "auto":
        return BACKENDS[automatic(device)]
    if why := unavailable(backend, device):
        raise ForgeError(f"train.attention = {backend!r} on {device.type}: {why}; auto picks one that runs")
    return BACKENDS[backend]


__all__ = ["BACKENDS", "Attend", "Backend", "TreeLayout", "above", "automatic", "pick", "unavailable"]
