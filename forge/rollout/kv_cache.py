"""The KV cache of the embedded engine: one preallocated row per slot, handed to transformers as its `Cache`.

A prompt is spared what some row holds already: the conversation's last turn, a system prompt that others share,
or the same prompt computed for another member of its group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache

#: Keys attended to are rounded up to a multiple of this, so that few tensor shapes occur.
KEY_BLOCK = 32

#: A prompt waits for another that is about to compute at least so many tokens for both.
WORTH_WAITING = 32


class SlotCache(Cache):  # type: ignore[misc]
    """KV of `slots` rows, and which tokens each row's KV was computed from.

    kv [layers, 2, slots + 1, kv heads, max_context, head dim]; the last row is a bin for the writes of padding.
    `tokens[r, :length[r]]` are the ids whose KV row r holds. `reusable[r]` says that all of it comes from the
    present weights. `released[r]` orders rows by when they were last given up.
    """

    def __init__(self, config: Any, *, slots: int, max_context: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[])
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, slots + 1, heads, max_context, dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        # Views made once: of each layer's keys and values, whole and with one line per (row, head, position).
        self._halves = [[(half, half.flatten(0, 2)) for half in layer] for layer in self.kv]
        self.tokens = np.zeros((slots, max_context), dtype=np.int64)
        self.length = np.zeros(slots, dtype=np.int64)
        self.reusable = np.zeros(slots, dtype=np.bool_)
        self.released = np.zeros(slots, dtype=np.int64)

    def plan(self, rows: NDArray[np.int64], positions: NDArray[np.int64], padding: NDArray[np.bool_]) -> Tensor:
        """Say what the next forward writes: `rows` [n], `positions` [n, q], padding [n, q]. Returns its mask.

        The mask [n, 1, q, keys] is additive, in the cache's dtype. A padded query sees key 0, never nothing, so
        that no NaN arises; its KV goes to the bin.
        """
        heads, max_context = self.kv.shape[3:5]
        reach = int(positions.max()) + 1
        self._keys = min(max_context, -(-reach // KEY_BLOCK) * KEY_BLOCK)
        written = np.where(padding, len(self.length), rows[:, None])
        target = (written[:, None, :] * heads + np.arange(heads)[:, None]) * max_context + positions[:, None, :]
        device = self.kv.device
        self._target = torch.from_numpy(target.reshape(-1)).to(device)
        count = len(rows)
        # Rows 0..n-1 are read as a view; any other choice of rows is gathered.
        self._rows = None if np.array_equal(rows, np.arange(count)) else torch.from_numpy(rows).to(device)
        self._count = count
        seen = torch.from_numpy(np.where(padding, 0, positions)).to(device)
        hidden = torch.arange(self._keys, device=device) > seen[:, None, :, None]
        return torch.zeros(hidden.shape, dtype=self.kv.dtype, device=device).masked_fill_(hidden, -torch.inf)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the planned positions' KV [n, kv heads, q, dim]; return all keys and values the plan may see."""
        (keys, key_lines), (values, value_lines) = self._halves[layer_idx]
        key_lines.index_copy_(0, self._target, key_states.flatten(0, 2))
        value_lines.index_copy_(0, self._target, value_states.flatten(0, 2))
        return self._visible(keys), self._visible(values)

    def _visible(self, half: Tensor) -> Tensor:
        if self._rows is None:
            return half[: self._count, :, : self._keys]
        return half[:, :, : self._keys].index_select(0, self._rows)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        reach = int(max(self.length[a], self.length[b]))
        first, second = self.kv[:, :, a, :, :reach], self.kv[:, :, b, :, :reach]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
        for column in (self.tokens, self.length, self.reusable, self.released):
            column[[a, b]] = column[[b, a]]

    def claim(self, prompt: NDArray[np.int64], free: NDArray[np.int64]) -> tuple[int, int]:
        """Take one of the `free` rows for a prompt; returns (row, number of its tokens whose KV is there already).

        A free row that holds the prompt's beginning and nothing else is taken over: the next turn of its
        conversation. Otherwise the row given up longest ago, so that other conversations stay.
        """
        held = self._held(prompt)
        row = int(held.argmax())
        if not (row in free and held[row] == self.length[row] > 0):
            row = int(free[np.where(self.reusable[free], self.released[free], -1).argmin()])
        self.tokens[row, : len(prompt)] = prompt
        self.length[row] = held[row]
        self.reusable[row] = True
        return row, int(held[row])

    def borrow(self, row: int, prompt_length: int) -> int:
        """Copy into a row the part of its prompt that another row has computed since; returns the tokens gained."""
        held = self._held(self.tokens[row, :prompt_length])
        source = int(held.argmax())
        have, reach = int(self.length[row]), int(held[source])
        if reach <= have:
            return 0
        self.kv[:, :, row, :, have:reach] = self.kv[:, :, source, :, have:reach]
        self.length[row] = reach
        return reach - have

    def _held(self, prompt: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many leading tokens of the prompt each row's KV can stand for, 0 where it is not reusable.

        At least one token is left to compute, for its logits.
        """
        common = _common_prefix(self.tokens, prompt[:-1])
        return np.where(self.reusable, np.minimum(common, self.length), 0)

    def worth_waiting(self, rows: NDArray[np.int64], prompt_lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `rows` [n], in order, had better wait: an earlier one will compute a long part of their prompt."""
        waits = np.zeros(len(rows), dtype=np.bool_)
        for i in range(1, len(rows)):
            common = _common_prefix(self.tokens[rows[:i]], self.tokens[rows[i], : prompt_lengths[i] - 1])
            gain = np.minimum(common, prompt_lengths[:i]) - self.length[rows[i]]
            waits[i] = bool((self.reusable[rows[:i]] & (gain >= WORTH_WAITING)).any())
        return waits

    def scrub(self) -> None:
        """Clear what is not finite: masked keys are multiplied by 0, and 0 times NaN is NaN, so it would spread."""
        self.kv.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def forget(self) -> None:
        """The weights changed: running rows go on with what they hold, but no later request may reuse any of it."""
        self.reusable[:] = False

    def restart(self, rows: NDArray[np.int64]) -> None:
        """These rows' KV is computed anew from their tokens, by the present weights."""
        self.length[rows] = 0
        self.reusable[rows] = True


def _common_prefix(lines: NDArray[np.int64], prompt: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many leading tokens each of `lines` [n, tokens] shares with the prompt."""
    if not len(prompt):
        return np.zeros(len(lines), dtype=np.int64)
    differs = lines[:, : len(prompt)] != prompt
    return np.where(differs.any(1), differs.argmax(1), len(prompt))
