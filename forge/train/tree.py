"""Prefix-tree merging for any Hugging Face causal LM: forward each distinct token once, lose nothing.

    merged = TreeModel(model)
    logprobs = merged.logprobs([[5, 7, 9], [5, 7, 8, 2]])   # per sequence, with gradient
    loss = -(logprobs[0].sum() + logprobs[1].sum())
    loss.backward()                                          # autograd sums what was shared

`forge.train.verify.verify(model, sequences)` compares one batch with the plain per-sequence path: loss, logprobs and
every gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from forge.forest import Forest, Ints, token_ids
from forge.train.attention import Backend, TreeLayout, pick
from forge.train.attention.layout import tensor
from forge.train.heads import logits_of_rows
from forge.train.tree_hook import TreeCall, tree_attention
from forge.train.tree_refusal import UnsupportedModelError, check
from forge.types import ForgeError

#: how far logits of the trial may be off, relative to the largest: rounding, and no more
TRIAL, TRIAL_ROUGH = 1e-3, 0.1


@dataclass(frozen=True, eq=False, kw_only=True)
class Targets:
    """Which tokens are predicted, un-merged: N of them, sequence by sequence.

    `rows` [R] are the distinct tokens of the forest whose logits are needed; pair n reads row `row_of[n]` and wants
    token `ids[n]`; `counts` [n] says how many pairs each sequence has.
    """

    rows: Ints
    row_of: Ints
    ids: Ints
    counts: Ints

    @classmethod
    def after(cls, forest: Forest, sequences: Sequence[Ints]) -> Targets:
        """Every token but the first of its sequence. The forest is of the sequences without their last tokens."""
        ids = [sequence[1:] for sequence in sequences]
        rows, row_of = np.unique(forest.nodes, return_inverse=True)
        counts = np.array([len(one) for one in ids], dtype=np.int64)
        return cls(rows=rows, row_of=row_of, ids=np.concatenate([*ids, np.empty(0, np.int64)]), counts=counts)


class TreeModel:
    """A causal LM whose forward pass reads forests. Raises UnsupportedModelError for one it cannot serve exactly.

    `backend` is a name of `forge.train.attention`. `autocast`: compute in bfloat16 with the weights as they are. What a
    model declares is checked before every pass; what it does not declare shows in a trial of six tokens, merged and
    plain, when this object is made.
    """

    def __init__(self, model: Any, backend: Backend = "auto", *, autocast: bool = False) -> None:
        check(model)
        self.model = model
        self.autocast = autocast
        self.device: torch.device = next(model.parameters()).device
        self.attend = pick(backend, self.device)
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self._try_out()

    @torch.no_grad()
    def _try_out(self) -> None:
        stem, tails = [1, 2], ([3, 4], [5, 6])
        ids = [np.array([*stem, *tail], dtype=np.int64) % self.vocabulary for tail in tails]
        forest = Forest.of(ids)
        call = TreeCall(TreeLayout.of(forest), self.attend)
        rows = tensor(np.arange(len(forest)), self.device)
        kind = type(self.model).__name__
        try:
            merged = self.logits_of_chunk(forest, 0, len(forest), call, rows)
            every = tensor(np.arange(len(ids[0])), self.device)
            plain = [
                logits_of_rows(self.model, every, autocast=self.autocast, input_ids=tensor(one, self.device)[None])
                for one in ids
            ]
        except UnsupportedModelError:
            raise
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            raise UnsupportedModelError(
                f"{kind}: a trial of six tokens failed: {type(error).__name__}: {said}"
            ) from error
        mine = [merged[tensor(forest.nodes_of(i), self.device)] for i in range(len(ids))]
        gap = max(float((a - b).abs().max()) for a, b in zip(mine, plain, strict=True))
        size = max(float(one.abs().max()) for one in plain)
        rough = self.autocast or merged.dtype in (torch.bfloat16, torch.float16)
        if not gap <= size * (TRIAL_ROUGH if rough else TRIAL):
            raise UnsupportedModelError(
                f"{kind}: in a trial of six tokens its logits are off by {gap:.2g} when prefixes are merged: it sees "
                f"more than what stands before a token, or places tokens by something else than position_ids"
            )
        if declared_window(self.model) and call.windows == {None}:
            raise UnsupportedModelError(
                f"{kind}: it declares a sliding window that its attention layers are not told of"
            )

    def logits(self, forest: Forest, rows: Tensor) -> Tensor:
        """[R, vocabulary]: logits after each of `rows`, tokens of the forest."""
        call = TreeCall(TreeLayout.of(forest), self.attend)
        return self.logits_of_chunk(forest, 0, len(forest), call, rows)

    def logits_of_chunk(self, forest: Forest, first: int, last: int, call: TreeCall, rows: Tensor) -> Tensor:
        """The same for tokens `first` to `last` - 1 of the forest, given their past; `rows` count from `first`."""
        tokens, depth = forest.tokens[first:last], forest.depth[first:last]
        with tree_attention(self.model):
            return logits_of_rows(
                self.model,
                rows,
                autocast=self.autocast,
                input_ids=tensor(tokens, self.device)[None],
                position_ids=tensor(depth, self.device)[None],
                tree=call,
            )

    def logprobs(self, sequences: Sequence[ArrayLike], temperature: float = 1.0) -> list[Tensor]:
        """For each sequence of n tokens the log-probabilities [n - 1] in nats of all but its first, with gradient.

        Logits are divided by `temperature`; softmax runs in float32, or float64 where the model does. Sequences shorter
        than two tokens give an empty tensor. Raises ForgeError for what is no token id of this model.
        """
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ForgeError(f"temperature = {temperature}: must be a positive number")
        ids = [token_ids(sequence, f"sequence {i}") for i, sequence in enumerate(sequences)]
        if (largest := max((int(one.max()) for one in ids if len(one)), default=0)) >= self.vocabulary:
            raise ForgeError(f"token id {largest}: the model knows {self.vocabulary} tokens")
        forest = Forest.of([one[:-1] for one in ids])
        targets = Targets.after(forest, ids)
        if not len(forest):
            return [torch.zeros(0, device=self.device) for _ in ids]
        logits = self.logits(forest, tensor(targets.rows, self.device))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        table = torch.log_softmax(wide / temperature, dim=-1)
        flat = table[tensor(targets.row_of, self.device), tensor(targets.ids, self.device)]
        return list(flat.split(targets.counts.tolist()))


def declared_window(model: Any) -> bool:
    """Whether a model says that some of its layers have a sliding window."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
