"""Tree attention by MagiAttention's flexible flash kernel (Hopper GPUs), where it is installed. Not run by us.

It takes rectangles of (query range, key range), each full or bottom-right causal: two a segment, the square of its
own tokens and the rows below it.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from forge.train.attention.layout import TreeLayout
from forge.types import ForgeError

FULL, CAUSAL = 0, 1


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float, window: int | None) -> Tensor:
    from magi_attention.api import flex_flash_attn_func

    if layout.windowed(window) is not None:
        raise ForgeError("train.attention = magi: sliding windows by depth are not rectangles; use flex or varlen")
    rectangles = ranges(layout)

    def rows(first: int, last: int) -> Tensor:
        picked = [rectangle[first:last] for rectangle in rectangles]
        return torch.tensor(picked, dtype=torch.int32, device=q.device)

    kinds = torch.tensor([r[4] for r in rectangles], dtype=torch.int32, device=q.device)
    flat = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
    out = flex_flash_attn_func(*flat, rows(0, 2), rows(2, 4), attn_type_map=kinds, softmax_scale=scale)
    result: Tensor = out[0]
    return result.transpose(0, 1)[None]


def ranges(layout: TreeLayout) -> list[tuple[int, int, int, int, int]]:
    """(first query, one past the last, first key, one past the last, kind) that together are the tree mask."""
    out = []
    for a, b, end in layout.runs:
        if a < layout.past:
            out.append((0, end, a, b, FULL))
            continue
        start, stop = a - layout.past, b - layout.past
        out.append((start, stop, a, b, CAUSAL))
        if stop < end:
            out.append((stop, end, a, b, FULL))
    return out


def is_installed() -> bool:
    """PyPI's package of this name is an empty placeholder: only one with the API counts."""
    try:
        return importlib.util.find_spec("magi_attention.api") is not None
    except ModuleNotFoundError:
        return False
