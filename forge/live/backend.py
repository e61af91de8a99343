"""The gateway's backend in a live run: a trajectory in, the router's choice, an engine's tokens out, all traced."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from forge import trace as ev
from forge.control import Control
from forge.gateway.backend import Overloaded, UnknownTrajectoryError
from forge.gateway.budget import Budget, BudgetSpent
from forge.gateway.gateway import Gateway
from forge.gateway.report import Report, measured
from forge.live.fleet import Fleet
from forge.rollout.engine import Delta, EngineRequest, Sampling
from forge.types import Completion, DeathReason, Outcome

RESTART_POLL_S = 0.05


@dataclass
class OpenTrajectory:
    """A trajectory that may generate. `position` None: an evaluation, kept out of the queue and the trace."""

    id: str
    sampling: Sampling
    position: int | None
    member: int
    requests: int = 0
    tokens: int = 0  # sampled, of what is recorded
    completions: list[Completion] = field(default_factory=list)
    report: Report = field(default_factory=Report)
    echoes: Counter[str] = field(default_factory=Counter)  # how replies came back; known once it is closed
    measured: Outcome | None = None  # what the gateway alone could tell of it; known once it is closed
    overdrawn: str | None = None  # it asked for more than its budget: what it was told


class LiveBackend:
    """Implements `forge.gateway.backend.Backend`; the gateway before it pins the sampling to what `open` gives."""

    def __init__(
        self,
        *,
        model: str,
        fleet: Fleet,
        control: Control,
        clock: Callable[[], float],
        budget: Budget,
        ended: Callable[[Outcome], None],
    ) -> None:
        """`ended` hears of every trajectory that a report has ended, which it closes."""
        self._model = model
        self._budget = budget
        self._ended = ended
        self._fleet = fleet
        self._control = control
        self._clock = clock
        self.trajectories: dict[str, OpenTrajectory] = {}
        self._evaluations = 0
        self.gateway: Gateway | None = None  # known once the app is made around this backend

    @property
    def model(self) -> str:
        return self._model

    @property
    def max_context(self) -> int:
        return self._fleet.max_context

    @property
    def fault(self) -> str | None:
        return None if self._fleet.versions() else "every engine is being restarted"

    def now(self) -> float:
        return self._clock()

    def admit(self, trajectory: OpenTrajectory) -> None:
        self.trajectories[trajectory.id] = trajectory

    def close(self, trajectory: str) -> OpenTrajectory | None:
        """It may generate no more; what it has in flight is cancelled."""
        known = self.trajectories.pop(trajectory, None)
        if self.gateway is not None and known is not None:
            tree = self.gateway.tree(trajectory)
            known.echoes = tree.echoes
            known.measured = measured(trajectory, tree, known.completions, reason=DeathReason.AGENT_CRASH, detail="")
            self.gateway.forget(trajectory)
        return known

    def open(self, trajectory: str) -> Sampling:
        known = self._find(trajectory)
        try:
            self._budget.check(known.requests, known.tokens)
        except BudgetSpent as spent:
            known.overdrawn = str(spent)
            raise
        if known.position is not None:
            retry_s = self._control.refuse(
                self._clock(), position=known.position, member=known.member, turn=known.requests
            )
            if retry_s is not None:
                raise Overloaded(retry_s)
        return known.sampling

    def record(self, completion: Completion) -> None:
        """A late completion of a trajectory already closed (its item timed out) is dropped with it."""
        known = self.trajectories.get(completion.trajectory)
        if known is not None:
            known.completions.append(completion)
            known.tokens += len(completion.sampled_ids)

    def report(self, trajectory: str, report: Report) -> None:
        known = self._find(trajectory)
        known.report = report
        if report.ended and self.gateway is not None:
            tree, reason = self.gateway.tree(trajectory), DeathReason.AGENT_CRASH
            told = measured(trajectory, tree, known.completions, reason=reason, detail="ended without a reward")
            self._ended(report.outcome(told))

    async def generate(
        self, trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        known = self._find(trajectory)
        request = f"{trajectory}.{known.requests}"
        known.requests += 1
        while not self._fleet.versions():  # every engine is being restarted: the request waits, as any queued one
            await asyncio.sleep(RESTART_POLL_S)
        instance = self._place(known, request, len(prompt_ids))
        account = _Accounting(self._control, self._clock, request, traced=known.position is not None)
        deltas = self._fleet.generate(instance, EngineRequest(id=request, prompt_ids=prompt_ids, sampling=sampling))
        try:
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    account.take(delta)
                    yield instance, delta
        finally:
            account.end("cancelled")

    def _place(self, known: OpenTrajectory, request: str, prompt_tokens: int) -> int:
        if known.position is None:
            self._evaluations += 1
            return self._evaluations % len(self._fleet.counters())
        return self._control.route(
            self._clock(),
            request=request,
            position=known.position,
            member=known.member,
            turn=known.requests - 1,
            prompt_tokens=prompt_tokens,
        )

    def _find(self, trajectory: str) -> OpenTrajectory:
        try:
            return self.trajectories[trajectory]
        except KeyError:
            raise UnknownTrajectoryError(trajectory) from None


class _Accounting:
    """FirstToken once, Completed exactly once, however the request ends."""

    def __init__(self, control: Control, clock: Callable[[], float], request: str, *, traced: bool) -> None:
        self._control, self._clock, self._request = control, clock, request
        self._open = traced
        self._tokens = 0
        self._versions: tuple[int, int] = (0, 0)

    def take(self, delta: Delta) -> None:
        if not self._open:
            return
        if delta.token_ids:
            if self._tokens == 0:
                self._control.account(ev.FirstToken(t=self._clock(), request=self._request))
                self._versions = (delta.versions[0], delta.versions[0])
            self._versions = (self._versions[0], delta.versions[-1])
            self._tokens += len(delta.token_ids)
        if delta.finish is not None:
            self.end(delta.finish)

    def end(self, finish: str) -> None:
        if self._open:
            self._open = False
            self._control.account(
                ev.Completed(
                    t=self._clock(),
                    request=self._request,
                    tokens=self._tokens,
                    finish=finish,
                    versions=self._versions,
                )
            )
