"""The hook into transformers: any causal LM that uses its attention interface reads a prefix forest, unmodified.

    with tree_attention(model):
        model(input_ids=..., position_ids=depths, tree=TreeCall(layout, attend))

The layout travels as a keyword through the model's own forward down to every attention layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from forge.train.attention import Attend, TreeLayout
from forge.types import ForgeError

NAME = "forge_tree"


class UnsupportedModelError(ForgeError):
    """A model that the merged forward would not serve exactly; the message says why."""


@dataclass
class TreeCall:
    """What every attention layer of one forward pass is given. `past` holds the keys and values of the path above the
    queries, by layer, each [1, H_kv, past, D]; `own` is filled with those of the queries' own tokens."""

    layout: TreeLayout
    attend: Attend
    past: dict[int, tuple[Tensor, Tensor]] | None = None
    own: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
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
    if tree is None:
        raise RuntimeError(f"{NAME}: the model did not pass the tree on to its attention layers")
    for what, given in (("logit soft-capping", softcap), ("attention sinks", s_aux), ("position bias", position_bias)):
        if given is not None:
            raise UnsupportedModelError(f"{type(module).__name__}: {what} in attention is not served")
    if dropout:
        raise UnsupportedModelError(f"{type(module).__name__}: dropout {dropout} would differ between merged and not")
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does: rotary embeddings are float32
        low = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(low), key.to(low), value.to(low)
    layer = int(getattr(module, "layer_idx", len(tree.own)))
    tree.own[layer] = key, value
    if tree.past is not None:
        key, value = (torch.cat(pair, dim=2) for pair in zip(tree.past[layer], (key, value), strict=True))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = tree.attend(query, key, value, tree.layout, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)


@contextmanager
def tree_attention(model: Any) -> Iterator[None]:
    """Within, the model's attention layers expect a `tree`. Raises UnsupportedModelError."""
    check(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def check(model: Any) -> None:
    """Raises UnsupportedModelError with the first reason why merging would not be exact for this model."""
    if reason := refusal(model):
        raise UnsupportedModelError(f"{type(model).__name__}: {reason}; train it with train.merge = 'none'")


def refusal(model: Any) -> str | None:
    """Why this model cannot be served exactly, or None."""
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        return "an encoder sees both ways"
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if strange:
        return f"layers of type {strange[0]!r} have no handler"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "logit soft-capping in attention is not served"
    if getattr(config, "output_router_logits", False):
        return "its MoE auxiliary loss counts tokens once a forward and not once a sample; set output_router_logits off"
    return _refused_module(model)


def _refused_module(model: Any) -> str | None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            return f"dropout {module.p} at {name} would differ between merged and not; call eval()"
        if isinstance(module, nn.Conv1d | nn.RNNBase) or any(word in kind for word in STATEFUL):
            return f"{kind} at {name} mixes neighbours in the packed order, and has no handler"
        if getattr(module, "sinks", None) is not None:
            return f"attention sinks at {name} are not served"
        if getattr(module, "expert_capacity", None) is not None or getattr(module, "capacity_factor", None) is not None:
            return f"experts with a capacity at {name} drop tokens by their number"
        if module.training and getattr(module, "jitter_noise", 0):
            return f"router noise at {name} would differ between merged and not; call eval()"
    return None


#: parts of class names whose layers carry a state from one token to the next
STATEFUL = ("Mamba", "SSM", "RWKV", "Rwkv", "DeltaNet", "LinearAttention", "RecurrentBlock", "ShortConv")
