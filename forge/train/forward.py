"""Logprobs of the loss tokens of a micro-batch under the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from forge.train.microbatch import MicroBatch


def token_logprobs(model: Any, micro: MicroBatch, dtype: torch.dtype, autocast: bool) -> tuple[Tensor, Tensor]:
    """Logprob (with gradient) and entropy (without) of each of the N loss tokens, both [N] in nats.

    Under the distribution the rollout sampled: logits divided by the sample's temperature, the whole vocabulary kept.
    Softmax runs in `dtype` even where the model computes in bfloat16 under `autocast`.
    """
    head = model.get_output_embeddings()
    with _only_rows(head, micro.rows), torch.autocast(micro.rows.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=micro.input_ids, use_cache=False).logits[0]
    log_probs = torch.log_softmax(logits.to(dtype) / micro.temperature[:, None], dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(dim=-1)
    return log_probs.gather(1, micro.targets[:, None])[:, 0], entropy


@contextmanager
def _only_rows(head: nn.Module, rows: Tensor) -> Iterator[None]:
    """Within, `head` projects only `rows` of the flattened hidden states: [B, T, d] comes out as [1, N, vocabulary].

    With SmolLM2's 49,152 tokens the projection of prompts would cost more than the transformer. A hook, because the
    model's own forward then still applies what it does to its logits (scaling, soft caps).
    """

    def gather(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1)[rows].unsqueeze(0), *rest)

    handle = head.register_forward_pre_hook(gather)
    try:
        yield
    finally:
        handle.remove()
