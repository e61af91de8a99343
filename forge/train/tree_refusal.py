"""Models that the merged forward would not serve exactly, by what they declare. `TreeModel` tries the rest out."""

from __future__ import annotations

from typing import Any

from torch import nn

from forge.types import ForgeError

#: parts of class names whose layers carry a state from one token to the next
STATEFUL = ("Mamba", "SSM", "RWKV", "Rwkv", "DeltaNet", "LinearAttention", "RecurrentBlock", "ShortConv")
#: rotary embeddings whose angles depend on how long the whole forward pass is, and not on a token's position alone
LENGTH_DEPENDENT = {"dynamic", "longrope"}
#: parts of names of settings that make a forward pass random while training
RANDOM = ("drop", "jitter", "noise")


class UnsupportedModelError(ForgeError):
    """A model that the merged forward would not serve exactly; the message says why."""


def check(model: Any) -> None:
    """Raises UnsupportedModelError with the first reason why merging would not be exact for this model."""
    if reason := refusal(model):
        raise UnsupportedModelError(f"{type(model).__name__}: {reason}; train it with train.merge = 'none'")


def refusal(model: Any) -> str | None:
    """Why this model cannot be served exactly, or None."""
    if not hasattr(model, "config") or not hasattr(model, "set_attn_implementation"):
        return "not a Hugging Face causal LM"
    config = model.config.get_text_config()
    if config.is_encoder_decoder:
        return "an encoder sees both ways"
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if strange:
        return f"layers of type {strange[0]!r} have no handler"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention does not go through transformers' attention interface"
    if model.get_output_embeddings() is None:
        return "it has no language-model head"
    return _refused_config(config, training=model.training) or _refused_module(model)


def _refused_config(config: Any, *, training: bool) -> str | None:
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "logit soft-capping in attention is not served"
    if getattr(config, "output_router_logits", False):
        return "its MoE auxiliary loss counts tokens once a forward and not once a sample; set output_router_logits off"
    if getattr(config, "attn_temperature_tuning", False):
        return "its attention is scaled by the place in the forward pass"
    if dependent := sorted(rope_types(config) & LENGTH_DEPENDENT):
        return f"rotary embeddings of type {dependent[0]!r} depend on the longest sequence of the forward pass"
    for key, value in vars(config).items():
        if training and any(word in key for word in RANDOM) and isinstance(value, int | float) and value > 0:
            return f"{key} = {value} would differ between merged and not; call eval()"
    return None


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary embeddings a config declares, for all layers or by layer type."""
    declared = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    tables = [declared, *(value for value in declared.values() if isinstance(value, dict))]
    return {str(table.get("rope_type", table.get("type", "default"))) for table in tables}


def _refused_module(model: Any) -> str | None:
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
            return f"dropout {module.p} at {name} would differ between merged and not; call eval()"
        if module.training and getattr(module, "gradient_checkpointing", False):
            return "gradient checkpointing forwards layers again without the tree; switch it off"
        if isinstance(module, nn.Conv1d | nn.RNNBase) or any(word in kind for word in STATEFUL):
            return f"{kind} at {name} mixes neighbours in the packed order, and has no handler"
        if getattr(module, "sinks", None) is not None:
            return f"attention sinks at {name} are not served"
        if getattr(module, "expert_capacity", None) is not None or getattr(module, "capacity_factor", None) is not None:
            return f"experts with a capacity at {name} drop tokens by their number"
        if module.training and getattr(module, "jitter_noise", 0):
            return f"router noise at {name} would differ between merged and not; call eval()"
    return None
