"""Trajectories of agents that nobody here launched: each begins with its first request, and closes by a report, after
idle time, or with the service."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from forge.gateway.backend import UnknownTrajectoryError
from forge.gateway.budget import Budget
from forge.gateway.gateway import Gateway
from forge.gateway.report import Report, measured
from forge.types import Completion, DeathReason, Outcome


class Recording(Protocol):
    """Keeps closed trajectories. `begin` and `end` come once for each, in this order, with seconds on the run's clock;
    a name that has ended does not begin again."""

    def begin(self, trajectory: str, now: float) -> None: ...

    def end(self, completions: Sequence[Completion], outcome: Outcome, now: float) -> None: ...

    def has_ended(self, trajectory: str) -> bool: ...


@dataclass(slots=True)
class Session:
    """One trajectory under way. `calls` began, `tokens` were sampled in those that are recorded."""

    used_s: float
    calls: int = 0
    tokens: int = 0
    in_flight: int = 0
    report: Report = field(default_factory=Report)
    completions: list[Completion] = field(default_factory=list)


class Sessions:
    """Sessions by trajectory. Whoever makes the gateway gives it to `attach` before the first request.

    A session that was idle for `idle_s` ends as timed out, unless a reward was reported. Without a `recording` what
    closes is forgotten, and its name may begin anew.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        budget: Budget | None = None,
        idle_s: float = math.inf,
        recording: Recording | None = None,
    ) -> None:
        self.open: dict[str, Session] = {}
        self._clock = clock
        self._budget = budget or Budget()
        self._idle_s = idle_s
        self._recording = recording
        self._gateway: Gateway | None = None

    def attach(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def check(self, trajectory: str) -> int:
        """Whether it may generate; returns how many of its generations began before. Raises UnknownTrajectoryError for
        one that is over, BudgetSpent."""
        session = self.open.get(trajectory)
        if session is None:
            if self._recording is not None and self._recording.has_ended(trajectory):
                raise UnknownTrajectoryError(trajectory)
            return 0
        self._budget.check(session.calls, session.tokens)
        return session.calls

    @contextmanager
    def generating(self, trajectory: str) -> Iterator[None]:
        """Around one generation."""
        session = self.open.get(trajectory)
        if session is None:
            session = self.open[trajectory] = Session(self._clock())
            if self._recording is not None:
                self._recording.begin(trajectory, session.used_s)
        session.calls += 1
        session.in_flight += 1
        try:
            yield
        finally:
            session.in_flight -= 1
            session.used_s = self._clock()

    def record(self, completion: Completion) -> None:
        """A late one, of a trajectory already closed, is dropped with it."""
        session = self.open.get(completion.trajectory)
        if session is not None:
            session.tokens += len(completion.sampled_ids)
            session.used_s = self._clock()
            session.completions.append(completion)

    def report(self, trajectory: str, report: Report) -> None:
        """Raises UnknownTrajectoryError."""
        session = self.open.get(trajectory)
        if session is None:
            raise UnknownTrajectoryError(trajectory)
        session.report, session.used_s = report, self._clock()
        if report.ended:
            self._close(trajectory, DeathReason.AGENT_CRASH, "ended without a reward")

    def end(self, outcome: Outcome) -> None:
        """It is over, and whoever launched it knows how it ended; nothing where it never generated."""
        session = self.open.pop(outcome.trajectory, None)
        if session is not None:
            self._keep(session, session.report.outcome(outcome))

    def close_idle(self) -> None:
        """To be called now and then."""
        now = self._clock()
        idle = [name for name, one in self.open.items() if not one.in_flight and now - one.used_s >= self._idle_s]
        for name in idle:
            self._close(name, DeathReason.TIMEOUT, f"idle for {self._idle_s:g} s")

    def close_all(self, detail: str) -> None:
        """The service ends, and all that is under way with it."""
        for name in list(self.open):
            self._close(name, DeathReason.ENVIRONMENT, detail)

    def _close(self, trajectory: str, reason: DeathReason, detail: str) -> None:
        """`reason` and `detail` count where nobody reported how it ended."""
        assert self._gateway is not None, "attach the gateway"
        session = self.open.pop(trajectory)
        tree = self._gateway.tree(trajectory)
        told = measured(trajectory, tree, session.completions, reason=reason, detail=detail)
        self._keep(session, session.report.outcome(told))

    def _keep(self, session: Session, outcome: Outcome) -> None:
        assert self._gateway is not None, "attach the gateway"
        if self._recording is not None:
            self._recording.end(session.completions, outcome, self._clock())
        self._gateway.forget(outcome.trajectory)
