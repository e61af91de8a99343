"""The hook into transformers: any causal LM that uses its attention interface reads a prefix forest, unmodified.

    with tree_attention(model):
        model(input_ids=..., position_ids=depths, tree=TreeCall(layout, attend))

The layout travels as a keyword through the model's own forward down to every attention layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from forge.train.attention import Attend, TreeLayout
from forge.train.tree_refusal import UnsupportedModelError, check

NAME = "forge_tree"

#: one forward pass at a time on a model: the attention it uses is a setting of the model's own
_locks: WeakKeyDictionary[Any, RLock] = WeakKeyDictionary()


@dataclass
class TreeCall:
    """What every attention layer of one forward pass is given. `past` holds the keys and values of the path above the
    queries, by layer, each [1, H_kv, past, D]; `own` is filled with those of the queries' own tokens, `windows` with
    the sliding windows that layers asked for."""

    layout: TreeLayout
    attend: Attend
    past: dict[int, tuple[Tensor, Tensor]] | None = None
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    windows: set[int | None] = field(default_factory=set)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tree: TreeCall | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    _refuse(module, tree is None, "it does not pass the tree on to its attention layers")
    _refuse(module, attention_mask is not None, "a mask of the model's own making is not served")
    _refuse(module, softcap is not None, "logit soft-capping in attention is not served")
    _refuse(module, s_aux is not None, "attention sinks are not served")
    _refuse(module, position_bias is not None, "a position bias in attention is not served")
    _refuse(module, bool(dropout), f"dropout {dropout} would differ between merged and not; call eval()")
    assert tree is not None
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does: rotary embeddings are float32
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(low), key.to(low), value.to(low)
    layer = int(getattr(module, "layer_idx", len(tree.own)))
    tree.own[layer] = key, value
    tree.windows.add(sliding_window)
    if tree.past is not None:
        key, value = (torch.cat(pair, dim=2) for pair in zip(tree.past[layer], (key, value), strict=True))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = tree.attend(query, key, value, tree.layout, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, fault: bool, reason: str) -> None:
    if fault:
        raise UnsupportedModelError(f"{type(module).__name__}: {reason}")


AttentionInterface.register(NAME, _attention)


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Within, the model's attention layers expect a `tree`. Raises UnsupportedModelError."""
    check(model)
    with _locks.setdefault(model, RLock()):
        # Parts of a composite model (text, vision) may each have their own.
        configs = {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values()
        before = [(config, config._attn_implementation_internal) for config in configs]
        model.set_attn_implementation(NAME)
        try:
            yield
        finally:
            for config, implementation in before:
                config._attn_implementation_internal = implementation
