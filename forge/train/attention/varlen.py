"""Tree attention by variable-length flash kernels over gathered paths, for GPUs.

Every segment becomes one "sequence": its tokens ask, and the keys are the path from the root to its end, gathered. A
bottom-right aligned causal kernel then is exact. Keys are copied once a segment below them, so this pays where
segments are long. With flash-attn 2 where it is installed, else torch's own kernel; neither runs on a CPU, and neither
was run by us.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forge.train.attention.layout import TreeLayout, tensor

#: (q [T, H, D], k and v [S, H_kv, D], cu_q, cu_k, max_q, max_k, scale, window) to [T, H, D]; bottom-right causal
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int | None], Tensor]


@dataclass(frozen=True, eq=False)
class Paths:
    """Keys to gather for all segments, one after another, and where each begins."""

    gather: Tensor
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TreeLayout,
    scale: float,
    window: int | None,
    kernel: Kernel | None = None,
) -> Tensor:
    key = ("varlen", q.device)
    paths: Paths | None = layout.made.get(key)
    if paths is None:
        paths = layout.made[key] = gathered(layout, q.device)
    keys, values = (x[0].transpose(0, 1)[paths.gather] for x in (k, v))
    chosen = kernel or _kernel()
    flat = q[0].transpose(0, 1).contiguous()
    out = chosen(flat, keys, values, paths.cu_q, paths.cu_k, paths.max_q, paths.max_k, scale, layout.windowed(window))
    return out.transpose(0, 1)[None]


def gathered(layout: TreeLayout, device: torch.device) -> Paths:
    """The path of every segment's tokens, by keys."""
    open_: list[tuple[int, int, int]] = []
    lists: list[np.ndarray] = []
    sizes: list[int] = []
    for a, b, end in layout.runs:
        first = max(a - layout.past, 0)  # the past is before all queries
        while open_ and open_[-1][2] <= first and a >= layout.past:
            open_.pop()
        open_.append((a, b, end))
        if a >= layout.past:
            lists.append(np.concatenate([np.arange(x, y) for x, y, _ in open_]))
            sizes.append(b - a)
    lengths = [len(keys) for keys in lists]
    return Paths(
        gather=tensor(np.concatenate(lists), device),
        cu_q=torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32, device=device),
        cu_k=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device),
        max_q=max(sizes),
        max_k=max(lengths),
    )


def has_flash_attn() -> bool:
    """flash-attn 2. Its successor makes a namespace of the same name, so the module itself is looked for."""
    try:
        return importlib.util.find_spec("flash_attn.flash_attn_interface") is not None
    except ModuleNotFoundError:
        return False


def _kernel() -> Kernel:
    return _flash_attn if has_flash_attn() else _torch


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, w: int | None
) -> Tensor:
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    left = -1 if w is None else w - 1
    out: Tensor = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=True, window_size=(left, 0)
    )
    return out


def _torch(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float, w: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if w is None else w - 1
    gqa = q.shape[1] != k.shape[1]
    out = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(left, 0), enable_gqa=gqa)
    assert isinstance(out, Tensor)
    return out
