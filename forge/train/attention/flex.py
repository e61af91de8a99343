"""Tree attention by torch's FlexAttention, for GPUs: it has no backward pass on a CPU (torch 2.13). Not run on a GPU
by us; forward pass and masks are tested on a CPU.

The block mask is worked out from `end` alone, in O(K + blocks), never by evaluating a mask function on every pair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from forge.forest import Ints
from forge.train.attention.layout import TreeLayout, tensor

BLOCK = 128


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float, window: int | None) -> Tensor:
    window = layout.windowed(window)
    key = ("flex", window, q.device)
    mask = layout.made.get(key)
    if mask is None:
        mask = layout.made[key] = block_mask(layout, window, q.device)
    kernel = _compiled() if q.is_cuda else cast("Callable[..., Any]", flex_attention)
    out: Tensor = kernel(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


def block_mask(layout: TreeLayout, window: int | None, device: torch.device) -> BlockMask:
    """The tree mask in blocks of BLOCK x BLOCK: those seen in part, and those seen in full."""
    some, full = blocks(layout)
    if window is not None:  # a window hides more: no block is known to be seen in full, none is seen anew
        full = np.zeros_like(full)
    begin, end = tensor(layout.begin, device), tensor(layout.end, device)
    q_depth, k_depth = tensor(layout.q_depth, device), tensor(layout.k_depth, device)

    def seen(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        inside = (begin[k] <= q) & (q < end[k])
        return inside if window is None else inside & (q_depth[q] - k_depth[k] < window)

    return BlockMask.from_kv_blocks(
        *_listed(some & ~full, device),
        *_listed(full, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(layout.queries, layout.keys),
    )


def blocks(layout: TreeLayout) -> tuple[np.ndarray, np.ndarray]:
    """Boolean [query blocks, key blocks]: blocks with a pair that is seen, and blocks all of whose pairs are."""
    q_blocks, k_blocks = -(-layout.queries // BLOCK), -(-layout.keys // BLOCK)
    column = np.arange(layout.keys) // BLOCK
    # Each key's queries are one stretch, so they touch one stretch of blocks: mark where it begins and ends.
    steps = np.zeros((q_blocks + 1, k_blocks), dtype=np.int64)
    np.add.at(steps, (layout.begin // BLOCK, column), 1)
    np.add.at(steps, ((layout.end - 1) // BLOCK + 1, column), -1)
    some = np.cumsum(steps, axis=0)[:-1] > 0
    edges = np.arange(0, layout.keys, BLOCK)
    latest, earliest = np.maximum.reduceat(layout.begin, edges), np.minimum.reduceat(layout.end, edges)
    first = np.arange(q_blocks)[:, None] * BLOCK
    last = np.minimum(first + BLOCK, layout.queries)
    return some, (latest[None, :] <= first) & (last <= earliest[None, :])


def _listed(chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """What BlockMask wants: per row of query blocks how many key blocks, and which, chosen ones first."""
    order: Ints = np.argsort(~chosen, axis=1, kind="stable")
    counts = torch.tensor(chosen.sum(1), dtype=torch.int32, device=device)
    return counts[None, None], torch.tensor(order, dtype=torch.int32, device=device)[None, None]
