"""Logits of the positions that are read, and of no others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def logits_of_rows(model: Any, rows: Tensor, *, autocast: bool = False, **inputs: Any) -> Tensor:
    """[N, vocabulary]: the model's logits at `rows` [N] of its flattened [B * T] hidden states.

    `autocast`: compute in bfloat16 with the weights as they are. `inputs` are the model's own.
    """
    with _only_rows(model, rows), torch.autocast(rows.device.type, torch.bfloat16, enabled=autocast):
        logits: Tensor = model(use_cache=False, **inputs).logits[0]
    return logits


@contextmanager
def _only_rows(model: Any, rows: Tensor) -> Iterator[None]:
    """Within, the model's head projects only `rows`: [B, T, d] comes out as [1, N, vocabulary].

    With SmolLM2's 49,152 tokens the projection of prompts would cost more than the transformer. A hook, because the
    model's own forward then still applies what it does to its logits (scaling, soft caps).
    """

    def gather(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1)[rows].unsqueeze(0), *rest)

    handle = model.get_output_embeddings().register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()
