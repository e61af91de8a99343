"""The control loop both worlds run: decide, act, account. Start reading here.

A world (simulated or live) tells `Control` what happened and asks what to do. `Control` builds the view, calls the
policy, and accounts for the answer as trace events; it knows no clock, no device, no process. Because it is the
same object in both worlds, a policy tuned in one deploys unchanged in the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from forge import trace as ev
from forge.draws import draw
from forge.instances import Path
from forge.policies import Parking, Policies
from forge.policies.sync import SyncMode
from forge.queue import ItemQueue, QueueShape
from forge.types import DeathReason, ForgeError
from forge.views import Views

Sink = Callable[[ev.Event], None]

#: times N: that many items dead in a row, with none finished between them, end a run
DEATHS_PER_N = 10

_LOOK_AT = {
    DeathReason.TIMEOUT: "raise queue.item_timeout_s, or lower queue.concurrency or the domains' tool waits",
    DeathReason.AGENT_CRASH: "see the agents' errors in the pool or the log, or sim.domains.*.death_rate",
    DeathReason.ENVIRONMENT: "see the domains' tools and their errors",
    DeathReason.BUDGET: "raise live.trajectory_calls or live.trajectory_tokens, or see what the agents repeat",
    DeathReason.STALE: "raise policy.scheduler.park_reach, or park fewer or later",
    DeathReason.TOO_FEW_SURVIVORS: "see why members die, or raise queue.group",
}


def fingerprint(view: object) -> int:
    """crc32 of a view's text: enough to see that two worlds saw the same."""
    return zlib.crc32(repr(view).encode())


def commonest(reasons: Sequence[DeathReason]) -> DeathReason:
    """Why an item without enough survivors died: what killed most of its members, given in their order."""
    return max(reasons, key=reasons.count) if reasons else DeathReason.TOO_FEW_SURVIVORS


class Served(NamedTuple):
    """A request that left its instance, whole: what a long run is told instead of the request's three events."""

    position: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt, that the instance was believed to hold
    routed_s: float
    first_s: float | None  # its first token; None: it never came
    ended_s: float
    tokens: int  # sampled
    finish: str
    version: int  # of the weights that sampled the first token


Requests = Callable[[Served], None]


class Control:
    """Policies, the fold of everything that happened, and the sinks that keep it.

    Every event first passes the fold, which refuses illegal ones (QueueError), then each sink in order. `now` is
    always given by the world, in seconds since the run began, and never goes back.

    With `requests`, requests, reports and policy calls make no events: the fold gets them directly, and `requests` is
    called with each request once it has ended. Sinks then see the queue, refusals, the trainer and the weights only.

    `mix`: the domains' weights. `concurrency`: the most items under way at once; by default N.
    """

    def __init__(
        self,
        *,
        policies: Policies,
        shape: QueueShape,
        instances: int,
        group: int,
        seed: int,
        sinks: tuple[Sink, ...] = (),
        block: int = 1,
        mix: Mapping[str, float] | None = None,
        concurrency: int | None = None,
        requests: Requests | None = None,
    ) -> None:
        self.policies = policies
        self.views = Views(shape, instances, block, mix or {}, concurrency or shape.n)
        self.group = group
        self.seed = seed
        self.life = 0
        self._calls = 0
        self._deaths: list[DeathReason] = []  # since an item finished
        self._sinks = sinks
        self._traced = bool(sinks) and requests is None
        self.requests = requests

    @property
    def queue(self) -> ItemQueue:
        return self.views.queue

    # --- account ------

    def account(self, event: ev.Event) -> None:
        self.views.apply(event)
        for sink in self._sinks:
            sink(event)

    def resume(self, event: ev.Resumed) -> None:
        """Begin a new life with fresh policies (the caller made this Control anew)."""
        self.life, self._calls = event.life, 0
        self.account(event)

    # --- decide ------

    def _ask(self, now: float, slot: str, method: str, args: dict[str, Any]) -> Any:
        return self._asked(now, slot, method, args)[0]

    def _asked(self, now: float, slot: str, method: str, args: dict[str, Any]) -> tuple[Any, Any]:
        """The policy's decision, and the view it decided on."""
        at = self._next_draw(now)
        view = self.views.view(slot, at, args)
        decision = getattr(getattr(self.policies, slot), method)(view)
        if self._traced:
            call = ev.PolicyCall(
                t=now, slot=slot, method=method, args=args, draw=at, view=fingerprint(view), decision=decision
            )
            self.account(call)
        return decision, view

    def _next_draw(self, now: float) -> float:
        """A policy is asked, at `now`."""
        self.views.now = now
        self._calls += 1
        return draw(self.seed, self.life, self._calls - 1)

    @property
    def policy_calls(self) -> int:
        """Of this life."""
        return self._calls

    # --- what a world calls ------

    def dispatch(self, now: float) -> str | None:
        """The domain of the next item; None: not now. What it returns is to be submitted. Raises ForgeError."""
        if self.queue.running >= self.views.concurrency or not self.queue.may_submit():
            return None
        domain: str | None = self._ask(now, "dispatch", "next", {})
        if domain is not None and domain not in self.views.domains:
            raise ForgeError(f"policy.dispatch: chose {domain!r}; the domains are {', '.join(self.views.domains)}")
        return domain

    def submit(self, now: float, *, domain: str, difficulty: float, members: int) -> int:
        """Account the next item, which `dispatch` let begin. Returns its position."""
        position = len(self.queue)
        self.account(ev.Submitted(t=now, position=position, domain=domain, difficulty=difficulty, members=members))
        return position

    def refuse(self, now: float, *, position: int, member: int, turn: int) -> float | None:
        """Seconds after which the agent is to ask again, whose request is refused; None: it may be routed."""
        if not self.policies.dispatch.refuses:
            return None
        args = {"trajectory": f"{position}.{member}", "turn": turn}
        retry_s: float | None = self._ask(now, "dispatch", "refuse", args)
        if retry_s is not None:
            self.account(ev.Refused(t=now, position=position, member=member, turn=turn, retry_s=retry_s))
        return retry_s

    def route(
        self,
        now: float,
        *,
        request: str,
        position: int,
        member: int,
        turn: int,
        prompt_tokens: int,
        path: Path = (),
    ) -> int:
        """Which instance serves this request; accounted as in flight there until its `Completed` event. `path`: the
        KV blocks its prompt consists of, where the world knows them."""
        args: dict[str, Any] = {"trajectory": f"{position}.{member}", "turn": turn, "prompt_tokens": prompt_tokens}
        if path:
            args["path"] = path
        chosen, view = self._asked(now, "router", "route", args)
        self.account(
            ev.Routed(
                t=now,
                request=request,
                position=position,
                member=member,
                turn=turn,
                prompt_tokens=prompt_tokens,
                instance=chosen,
                cached_tokens=min(view.cached.get(chosen, 0), prompt_tokens - 1),
            )
        )
        return int(chosen)

    def route_unseen(
        self, now: float, request: str, trajectory: str, turn: int, prompt_tokens: int, path: Path
    ) -> tuple[int, int]:
        """`route` without events; returns the instance, and the tokens of the prompt believed cached there."""
        view = self.views.router_view(
            self._next_draw(now), trajectory=trajectory, turn=turn, prompt_tokens=prompt_tokens, path=path
        )
        chosen = self.policies.router.route(view)
        held = min(view.cached.get(chosen, 0), prompt_tokens - 1)
        self.views.instances.routed(request, chosen, prompt_tokens, held, now)
        return chosen, held

    def take(self, now: float) -> list[int]:
        """Take whatever the scheduler picks, until it waits or the forming batch is full; where it waits and the head
        could be parked, ask for that too. Also ends where `queue.stale()` items must die first: the world ends their
        agents, accounts their deaths, and calls again.
        """
        taken: list[int] = []
        queue = self.queue
        while len(queue.forming) < queue.shape.batch and not queue.stale():
            position = self._ask(now, "scheduler", "pick", {}) if queue.finished_order else None
            if position is not None:
                self.account(ev.Taken(t=now, position=position, lag_items=queue.lag_if_taken(position)))
                taken.append(position)
            elif not self._park(now):
                break
        return taken

    def park_due(self, position: int) -> float | None:
        """From when on the scheduler is asked whether to park this waiting item while it is the head: a world calls
        `take` then, as nothing else may happen. None: never."""
        scheduler = self.policies.scheduler
        if not self.queue.shape.park_items or not isinstance(scheduler, Parking):
            return None
        return self.views.items[position].submitted_s + scheduler.park_after_s

    def _park(self, now: float) -> bool:
        """Whether the head was parked."""
        if not self.queue.may_park():
            return False
        due = self.park_due(self.queue.head)
        position = None if due is None or now < due else self._ask(now, "scheduler", "park", {})
        if position is not None:
            self.account(ev.Parked(t=now, position=position))
        return position is not None

    def start_step(self, now: float, *, ending: bool) -> list[int]:
        """The batch to train on now, or []. `ending`: nothing more will be submitted, so what remains once all under
        way has ended is a batch too, however small."""
        queue = self.queue
        full = len(queue.forming) == queue.shape.batch
        last = ending and not queue.running and not queue.finished_order
        if queue.training or not (full or (last and queue.forming)):
            return []
        positions = tuple(queue.forming)
        self.account(ev.StepStarted(t=now, step=self.views.step + 1, positions=positions, partial=not full))
        return list(positions)

    def commit(
        self,
        now: float,
        *,
        train_s: float,
        data_s: float,
        io_s: float,
        tokens: int,
        metrics: Mapping[str, float | None],
    ) -> SyncMode | None:
        """The checkpoint of the batch in training is durable. Returns how to publish it, or None to wait."""
        self.account(
            ev.Committed(
                t=now,
                step=self.views.step + 1,
                positions=tuple(self.queue.training),
                train_s=train_s,
                data_s=data_s,
                io_s=io_s,
                tokens=tokens,
                metrics=dict(metrics),
            )
        )
        mode: SyncMode | None = self._ask(now, "sync", "decide", {})
        return mode

    def publish(self, now: float, *, version: int, step: int, items: int) -> None:
        """The slowest live engine serves `version`, which holds the first `items` committed items."""
        self.account(ev.Published(t=now, version=version, step=step, items=items))

    def finish(
        self,
        now: float,
        position: int,
        *,
        tokens: int,
        rewards: list[float],
        reason: DeathReason = DeathReason.TOO_FEW_SURVIVORS,
    ) -> None:
        """Every member of an item ended. Fewer than two survivors of a group leave no baseline: it is dead.

        `rewards` are the survivors'; `reason` says what killed the others. Raises ForgeError as `die` does.
        """
        if len(rewards) < min(2, self.group):
            self.die(now, position, reason, tokens=tokens)
            return
        self._deaths.clear()
        mean = sum(rewards) / len(rewards)
        self.account(ev.Finished(t=now, position=position, tokens=tokens, reward=mean))

    def die(self, now: float, position: int, reason: DeathReason, *, tokens: int) -> None:
        """Raises ForgeError, with the death accounted, where nothing but deaths happens: such a run need never end."""
        self.account(ev.Dead(t=now, position=position, reason=reason.value, tokens=tokens))
        self._deaths.append(reason)
        if len(self._deaths) >= DEATHS_PER_N * self.queue.shape.n:
            worst = commonest(self._deaths)
            raise ForgeError(
                f"{len(self._deaths)} items died in a row and none finished, most of them of {worst.value!r}: "
                f"{_LOOK_AT[worst]}"
            )
