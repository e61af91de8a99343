"""Train schedulers: which finished item to take next (DESIGN section 2, Windowed FIFO)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Literal, Protocol, runtime_checkable

from forge.queue import window_size
from forge.types import ForgeError
from forge.views import QueueView

#: Pydantic reads it as `__pydantic_config__`: in TOML an unknown key is an error, and so are nan and inf.
FORBID = {"extra": "forbid", "allow_inf_nan": False}


class TrainScheduler(Protocol):
    """Decides the order in which finished items are trained on.

    Contract: `window` is constant for a given N, in [1, N], or None for no window and no head rule; it fixes the
    queue's shape for the run. `pick` returns a finished position that the queue would let go, or None to wait. It
    is asked again after every event that could change the answer, so it never waits on time alone.
    """

    def window(self, n: int) -> int | None: ...

    def pick(self, view: QueueView) -> int | None: ...


@runtime_checkable
class Parking(TrainScheduler, Protocol):
    """Contract, for schedulers that let stragglers step aside (DESIGN section 2, Straggler escape).

    `park_items` (E) and `park_reach` (X, positions) are the queue's, constant for the run; 0 items: never. `park` is
    asked where `pick` waits and the queue could park its head, from `park_after_s` (seconds since the head's
    submission) on, and again after every event; it returns `view.head`, or None to leave it there.
    """

    park_items: int
    park_after_s: float
    park_reach: int

    def park(self, view: QueueView) -> int | None: ...


def check_escape(items: int, after_s: float, reach: int) -> None:
    """Raises ForgeError for numbers of an escape that no queue could have."""
    if items < 0:
        raise ForgeError(f"park_items = {items}: must be at least 0")
    if after_s < 0.0:
        raise ForgeError(f"park_after_s = {after_s:g}: must be seconds, at least 0")
    if reach < 0 or (items and not reach):
        raise ForgeError(f"park_reach = {reach}: must be at least 1 where park_items is not 0")


def head_in_the_way(view: QueueView, after_s: float) -> int | None:
    """The head, once it has run for so long and holds up finished items beyond its window, or submissions."""
    if not view.finished and view.submitted < view.head + view.n:
        return None
    head = next(islice(view.waiting, view.parked, None))
    return head.position if view.now >= head.submitted_s + after_s else None


def first_finished(view: QueueView, end: int) -> int | None:
    """The lowest finished position below `end`: greedy inside the window, oldest first among equals."""
    first = view.finished[0].position if view.finished else end
    return first if first < end else None


@dataclass(kw_only=True)
class WindowedFifo:
    """Greedy inside [head, head + W - 1], blind outside; W = floor(fraction * N), at least 1.

    With `park_items`, a head that has run for `park_after_s` and holds something up is parked: see `Parking`.
    """

    __pydantic_config__ = FORBID
    kind: Literal["windowed_fifo"] = "windowed_fifo"
    fraction: float = 0.3
    park_items: int = 0  # E; 0: no straggler escape
    park_after_s: float = 60.0  # since the head was submitted
    park_reach: int = 0  # X: positions the head may move on before a parked item dies stale

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ForgeError(f"fraction = {self.fraction:g}: must lie in (0, 1]")
        check_escape(self.park_items, self.park_after_s, self.park_reach)

    def window(self, n: int) -> int:
        return window_size(self.fraction, n)

    def pick(self, view: QueueView) -> int | None:
        return first_finished(view, view.head + self.window(view.n))

    def park(self, view: QueueView) -> int | None:
        return head_in_the_way(view, self.park_after_s)


@dataclass(kw_only=True)
class StrictFifo:
    """Submission order: W = 1. One straggler at the head stops training."""

    __pydantic_config__ = FORBID
    kind: Literal["strict_fifo"] = "strict_fifo"

    def window(self, n: int) -> int:  # noqa: ARG002 - the slot's signature
        return 1

    def pick(self, view: QueueView) -> int | None:
        return first_finished(view, view.head + 1)


@dataclass(kw_only=True)
class Greedy:
    """W = N: whatever is finished, under the head rule of admission (lag at most 2N - 2)."""

    __pydantic_config__ = FORBID
    kind: Literal["greedy"] = "greedy"

    def window(self, n: int) -> int:
        return n

    def pick(self, view: QueueView) -> int | None:
        return first_finished(view, view.head + view.n)


@dataclass(kw_only=True)
class Fffo:
    """First finished, first out: no window, no head rule, unbounded lag. A baseline only."""

    __pydantic_config__ = FORBID
    kind: Literal["fffo"] = "fffo"

    def window(self, n: int) -> None:  # noqa: ARG002 - the slot's signature
        return None

    def pick(self, view: QueueView) -> int | None:
        done = [(i.finished_s, i.position) for i in view.finished]
        return min(done)[1] if done else None
