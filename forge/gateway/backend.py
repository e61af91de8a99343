"""The seam between the gateway and whatever generates: routing, engines, processes, crashes lie behind it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from forge.gateway.report import Report
from forge.rollout.engine import Delta, Sampling
from forge.types import Completion


class UnknownTrajectoryError(LookupError):
    """No live trajectory has this id: answered with 404."""


class Overloaded(Exception):  # noqa: N818 - a state, not a fault
    """Answered with 429 and Retry-After."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"retry after {retry_after_s:g} s")
        self.retry_after_s = retry_after_s


class Backend(Protocol):
    """What the gateway needs from the system behind it. All times are `now()`, seconds on the run's clock.

    A trajectory id is opaque to the gateway. `open` says whether it may generate and returns its sampling defaults;
    `generate` yields deltas until one carries `finish`; closing the iterator early (client hung up) cancels the
    request. `record` is called exactly once per completed generation, before the last byte is sent to the client.
    """

    @property
    def model(self) -> str: ...

    @property
    def max_context(self) -> int: ...

    @property
    def fault(self) -> str | None:
        """Why it can generate nothing now; None: it can."""
        ...

    def now(self) -> float: ...

    def open(self, trajectory: str) -> Sampling:
        """Raises UnknownTrajectoryError, BudgetSpent, or Overloaded."""
        ...

    def generate(
        self, trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields (instance that served it, delta). Raises EngineError for what the engine refuses."""
        ...

    def record(self, completion: Completion) -> None: ...

    def report(self, trajectory: str, report: Report) -> None:
        """All that was said of a trajectory so far; with `report.ended` it is over. Raises UnknownTrajectoryError."""
        ...
