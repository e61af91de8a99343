"""Train schedulers: which finished item to take next (DESIGN section 2, Windowed FIFO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

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


def first_finished(view: QueueView, end: int) -> int | None:
    """The lowest finished position below `end`: greedy inside the window, oldest first among equals."""
    first = view.finished[0].position if view.finished else end
    return first if first < end else None


@dataclass(kw_only=True)
class WindowedFifo:
    """Greedy inside [head, head + W - 1], blind outside; W = floor(fraction * N), at least 1."""

    __pydantic_config__ = FORBID
    kind: Literal["windowed_fifo"] = "windowed_fifo"
    fraction: float = 0.3

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ForgeError(f"fraction = {self.fraction:g}: must lie in (0, 1]")

    def window(self, n: int) -> int:
        return window_size(self.fraction, n)

    def pick(self, view: QueueView) -> int | None:
        return first_finished(view, view.head + self.window(view.n))


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
