"""The reference: scaled dot-product attention under a dense mask, O(Q x K) memory. Runs anywhere."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forge.train.attention.layout import TreeLayout


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float, window: int | None) -> Tensor:
    window = layout.windowed(window)
    mask = layout.made.get(("dense", window))
    if mask is None:
        whole = layout.mask(slice(0, layout.queries), slice(0, layout.keys), window)
        mask = layout.made["dense", window] = torch.from_numpy(whole).to(q.device)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
