"""Tree attention on a CPU: one flash call a segment, partial outputs merged by log-sum-exp.

What lies below a segment stands right behind it, so a single top-left causal call of torch's CPU flash kernel with
the queries [segment and all below] and the keys [segment] is causal within the segment and full for the rest. The
partial results of the segments above a query merge exactly: out = sum_i exp(lse_i - lse) out_i. In the backward pass
the kernel's own backward, given the *merged* output and log-sum-exp, yields each segment's exact share (the identity
behind FlashAttention's backward, Dao et al. 2022, section 3: P = exp(S - lse) and D = rowsum(dO * O) need only these).

Many tiny segments would drown in calls; `plan` puts whole subtrees and rows of small siblings under one dense mask
where its cost model says that this is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from forge.train.attention.layout import TreeLayout

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

#: Cost in (query, key) pairs of a causal or full call, for choosing only: one pair under a mask, and one call. Rough
#: figures of one CPU; wrong ones cost time, never exactness.
MASKED_PAIR = 1.5
CALL = 6000.0
#: The kernel works on tiles of this many queries and keys: less than one costs as much.
TILE = 32
#: Siblings are gathered under one mask up to this many tokens, and no mask is larger than LARGEST on a side.
SIBLINGS = 512
LARGEST = 4096
#: Keys of one call under a sliding window.
WINDOW_KEYS = 512
#: Hides a key. Finite, so that a row which sees none of a call's keys gets weight exp(-1e30 - lse) = 0 and not NaN.
HIDDEN = -1e30


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call: queries [q0, q1) on keys [k0, k1). `masked`: under the layout's mask, else causal or full."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool = False
    masked: bool = False

    @property
    def cost(self) -> float:
        q, k = _tiled(self.q1 - self.q0), _tiled(self.k1 - self.k0)
        if self.masked:
            return CALL + MASKED_PAIR * q * k
        return CALL + q * k - (k * k / 2 if self.causal else 0)


def _tiled(n: int) -> int:
    return -(-n // TILE) * TILE


def attend(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, scale: float, window: int | None) -> Tensor:
    """q [1, H, Q, D], k and v [1, H_kv, K, D] on a CPU, to [1, H, Q, D]. Exact for float32, float64 and bfloat16."""
    plan = planned(layout, layout.windowed(window))
    width = v.shape[-1]
    if width < q.shape[-1]:  # as in multi-head latent attention; the kernel wants one size
        v = pad(v, (0, q.shape[-1] - width))
    out: Tensor = _Segments.apply(q, k, v, plan, scale)
    return out[..., :width]


@dataclass(eq=False)
class Plan:
    """The calls of one layout, and their masks by data type. Shared by all layers and both passes.

    Every key is in one call, or in none where a window hides it from all. `first[i]`: no query of call i was in an
    earlier one, so nothing is to be merged.
    """

    layout: TreeLayout
    window: int | None
    calls: list[Call]
    first: list[bool] = field(init=False)
    masks: dict[tuple[Call, torch.dtype], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        touched = np.zeros(self.layout.queries, dtype=bool)
        self.first = []
        for call in self.calls:
            self.first.append(not touched[call.q0 : call.q1].any())
            touched[call.q0 : call.q1] = True

    def mask(self, call: Call, dtype: torch.dtype) -> Tensor | None:
        if not call.masked:
            return None
        known = self.masks.get((call, dtype))
        if known is None:
            seen = self.layout.mask(slice(call.q0, call.q1), slice(call.k0, call.k1), self.window)
            known = torch.from_numpy(np.where(seen, 0.0, HIDDEN)).to(dtype)[None, None]
            self.masks[call, dtype] = known
        return known


def planned(layout: TreeLayout, window: int | None) -> Plan:
    """The plan of a layout, made once."""
    made: Plan | None = layout.made.get(("segments", window))
    if made is None:
        calls = plan(layout) if window is None else plan_window(layout, window)
        made = layout.made["segments", window] = Plan(layout, window, calls)
    return made


def plan(layout: TreeLayout) -> list[Call]:
    """The cheapest calls by the cost model, parents before children."""
    calls = [Call(0, end, a, b) for a, b, end in layout.runs if a < layout.past]
    own = [(a - layout.past, b - layout.past, end) for a, b, end in layout.runs if a >= layout.past]
    return calls + _Planner(own, layout.past).calls()


class _Planner:
    """Segments as a tree, children of one parent in a row; leaves first, each subtree picks its cheaper form."""

    def __init__(self, runs: list[tuple[int, int, int]], past: int) -> None:
        self.runs, self.past = runs, past
        self.children: list[list[int]] = [[] for _ in runs]
        self.roots: list[int] = []
        open_: list[int] = []
        for i, (start, _, _) in enumerate(runs):
            while open_ and runs[open_[-1]][2] <= start:
                open_.pop()
            (self.children[open_[-1]] if open_ else self.roots).append(i)
            open_.append(i)

    def calls(self) -> list[Call]:
        count = len(self.runs)
        best, parts = [0.0] * count, [[] for _ in range(count)]  # type: list[float], list[list[Call | int]]
        for i in reversed(range(count)):
            start, stop, end = self.runs[i]
            own = self._call(start, end, start, stop, causal=True)
            cost, below = self._siblings(self.children[i], best)
            apart: list[Call | int] = [own, *below]
            whole = self._call(start, end, start, end, masked=True)
            if end - start <= LARGEST and whole.cost < own.cost + cost:
                best[i], parts[i] = whole.cost, [whole]
            else:
                best[i], parts[i] = own.cost + cost, apart
        return _flattened(self._siblings(self.roots, best)[1], parts)

    def _siblings(self, family: list[int], best: list[float]) -> tuple[float, list[Call | int]]:
        """Rows of small siblings under one mask where that is cheaper: (cost, calls and subtrees left as they are)."""
        total, chosen, row = 0.0, [], []  # type: float, list[Call | int], list[int]

        def close() -> None:
            nonlocal total
            apart = sum(best[i] for i in row)
            if len(row) > 1:
                first, last = self.runs[row[0]][0], self.runs[row[-1]][2]
                together = self._call(first, last, first, last, masked=True)
                if together.cost < apart:
                    total += together.cost
                    chosen.append(together)
                    row.clear()
                    return
            total += apart
            chosen.extend(row)
            row.clear()

        for i in family:
            if row and self.runs[i][2] - self.runs[row[0]][0] > SIBLINGS:
                close()
            row.append(i)
        close()
        return total, chosen

    def _call(self, q0: int, q1: int, k0: int, k1: int, *, causal: bool = False, masked: bool = False) -> Call:
        return Call(q0, q1, k0 + self.past, k1 + self.past, causal, masked)


def _flattened(top: list[Call | int], parts: list[list[Call | int]]) -> list[Call]:
    calls: list[Call] = []
    stack = [*reversed(top)]
    while stack:
        item = stack.pop()
        if isinstance(item, Call):
            calls.append(item)
        else:
            stack.extend(reversed(parts[item]))
    return calls


def plan_window(layout: TreeLayout, window: int) -> list[Call]:
    """Under a sliding window: stretches of keys, each seen by the queries below it that are near enough, masked."""
    calls = []
    for a, b, end in layout.runs:
        for k0 in range(a, b, WINDOW_KEYS):
            k1 = min(k0 + WINDOW_KEYS, b)
            q0 = max(k0 - layout.past, 0)
            near = np.flatnonzero(layout.q_depth[q0:end] - layout.k_depth[k1 - 1] < window)
            if len(near):
                calls.append(Call(q0, q0 + int(near[-1]) + 1, k0, k1, masked=True))
    return calls


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: Plan, scale: float) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros(q.shape, dtype=wide)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide)
        for call, first in zip(plan.calls, plan.first, strict=True):
            rows = slice(call.q0, call.q1)
            part, part_lse = _forward(
                q[:, :, rows],
                k[:, :, call.k0 : call.k1],
                v[:, :, call.k0 : call.k1],
                0.0,
                call.causal,
                attn_mask=plan.mask(call, q.dtype),
                scale=scale,
            )
            if first:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse.to(wide))
        merged = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, merged, lse)
        ctx.plan, ctx.scale = plan, scale
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: Plan = ctx.plan
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        groups = q.shape[1] // k.shape[1]
        dq, dk, dv = torch.zeros(q.shape, dtype=wide), torch.zeros_like(k), torch.zeros_like(v)
        for call, first in zip(plan.calls, plan.first, strict=True):
            rows, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
            # The kernel's backward wants as many key as query heads.
            k_part, v_part = (
                x[:, :, keys] if groups == 1 else x[:, :, keys].repeat_interleave(groups, 1) for x in (k, v)
            )
            parts = _backward(
                grad[:, :, rows],
                q[:, :, rows],
                k_part,
                v_part,
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                call.causal,
                attn_mask=plan.mask(call, q.dtype),
                scale=ctx.scale,
            )
            if first:
                dq[:, :, rows] = parts[0]
            else:
                dq[:, :, rows] += parts[0]
            for into, part in ((dk, parts[1]), (dv, parts[2])):
                into[:, :, keys] = part if groups == 1 else part.unflatten(1, (-1, groups)).sum(2, dtype=wide)
        return dq.to(q.dtype), dk, dv, None, None


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Fold one call's result into the running ones, in place; both views of the whole."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_(torch.exp(lse - both)[..., None]).addcmul_(part.to(out.dtype), torch.exp(part_lse - both)[..., None])
    lse.copy_(both)
