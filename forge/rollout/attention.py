"""The attention the embedded engine gives to transformers models, and which models it would get wrong."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from forge.rollout.engine import EngineError

#: Name under which models are told to use `slot_attention`.
ATTENTION = "forge_slots"


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' SDPA attention, but a decode step does not copy the KV once per query head of a group.

    query [rows, heads, 1, dim] becomes [rows, kv heads, heads per kv head, dim]: the heads of a group are queries
    to the same keys, so no key is repeated. Returns [rows, 1, heads, dim].
    """
    rows, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    if queries != 1 or attention_mask is None or heads == kv_heads:
        out: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return out
    grouped = query.reshape(rows, kv_heads, heads // kv_heads, dim)
    mixed = nn.functional.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(rows, 1, heads, -1), None


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def check_supported(config: Any, max_context: int) -> None:
    """Raise EngineError for models whose attention this cache would get wrong."""
    window = getattr(config, "sliding_window", None)
    if window is not None and window < max_context and getattr(config, "use_sliding_window", True):
        raise EngineError(f"sliding_window {window} is shorter than max_context {max_context}: not supported")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise EngineError(f"layer types {sorted(kinds)} are not supported: only attention over a KV cache is")
    for setting in ("attn_logit_softcapping", "kv_lora_rank"):
        if getattr(config, setting, None):
            raise EngineError(f"models with {setting} are not supported")
