"""A train scheduler that leaves submission order only for a trainer that would wait, under a lag budget (DESIGN
section 2: an adaptive window)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forge.policies.scheduler import FORBID, check_escape, first_finished, head_in_the_way
from forge.queue import window_size
from forge.types import ForgeError
from forge.views import QueueView


@dataclass(kw_only=True)
class AdaptiveWindow:
    """In order while the trainer works; for a trainer that waits, as wide as its batch needs, up to W_max.

    W_max = min(N, L - N + 2) is what the lag budget L leaves of N + W - 2 <= L (with X more where items are parked); it
    is the queue's window for the run. Within `fraction` * N, items are taken as they finish. Beyond, only where the
    trainer has nothing to do and W_max holds enough finished items to fill its batch, the lowest first: a trainer that
    works needs no next batch yet, and less than a batch trains nothing, so leaving the order earlier buys nothing.
    It takes two numbers of the moment, items in training and finished items at hand, and keeps no state.

    With `park_items`, stragglers step aside as under `windowed_fifo`.
    """

    __pydantic_config__ = FORBID
    kind: Literal["adaptive_window"] = "adaptive_window"
    lag_budget: int = 0  # L, items; 0: none, W_max = N
    fraction: float = 0.0  # of N, the window at any time; 0: 1, strict order
    park_items: int = 0  # E; 0: no straggler escape
    park_after_s: float = 60.0  # since the head was submitted
    park_reach: int = 0  # X: positions the head may move on before a parked item dies stale

    def __post_init__(self) -> None:
        if self.lag_budget < 0:
            raise ForgeError(f"lag_budget = {self.lag_budget}: must be at least 1, or 0 for none")
        if not 0.0 <= self.fraction <= 1.0:
            raise ForgeError(f"fraction = {self.fraction:g}: must lie in [0, 1]")
        check_escape(self.park_items, self.park_after_s, self.park_reach)

    def window(self, n: int) -> int:
        """W_max. Raises ForgeError where the budget is too small for N."""
        if not self.lag_budget:
            return n
        reach = self.park_reach if self.park_items else 0
        widest = min(n, self.lag_budget - n + 2 - reach)
        if widest < 1:
            raise ForgeError(
                f"policy.scheduler.lag_budget = {self.lag_budget}: queue.n = {n} makes a lag of {n - 1 + reach} items "
                f"possible even in strict order; raise it, or lower queue.n or park_reach"
            )
        return widest

    def pick(self, view: QueueView) -> int | None:
        widest = self.window(view.n)
        always = min(widest, window_size(self.fraction, view.n))
        opens = not view.training and self._fills_a_batch(view, view.head + widest)
        return first_finished(view, view.head + (widest if opens else always))

    def _fills_a_batch(self, view: QueueView, end: int) -> bool:
        """Whether the batch that forms could be filled from below `end`."""
        missing = view.batch - view.forming
        return len(view.finished) >= missing and view.finished[missing - 1].position < end

    def park(self, view: QueueView) -> int | None:
        return head_in_the_way(view, self.park_after_s)
