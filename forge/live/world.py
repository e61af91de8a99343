"""The live world: what happens is accounted with `Control`, what it decides is done by child processes.

One asyncio loop owns the queue, the policies, the pool and the trace, so that all events have one order. Agents,
engines and the trainer are child processes; the gateway is served from this loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from forge import trace as ev
from forge.control import Control
from forge.domains.base import Domain, Task
from forge.domains.registry import get_domain
from forge.live.backend import LiveBackend, OpenTrajectory
from forge.live.child import Child
from forge.live.fleet import Fleet
from forge.live.groups import Group, left_behind, parse_trajectory, timed_out
from forge.live.scaffolding import scaffold_of
from forge.live.trainer_worker import Stepped
from forge.policies.sync import SyncMode
from forge.pool.store import Pool
from forge.rollout.engine import Sampling
from forge.scenario import Scenario
from forge.types import DeathReason, ItemState, Outcome, Trajectory

#: Grace after an item's own timeout before the world stops waiting for its agents.
BACKSTOP_S = 10.0


@dataclass
class _Publication:
    version: int
    step: int
    items: int


@dataclass
class LiveWorld:
    """Submit, play, take, train, publish, until the scenario's stop; then end what is under way."""

    scenario: Scenario
    control: Control
    pool: Pool
    clock: Callable[[], float]
    stop_ids: tuple[int, ...]
    fleet: Fleet = field(init=False)
    backend: LiveBackend = field(init=False)
    agents: Child = field(init=False)
    trainer: Child = field(init=False)
    groups: dict[int, Group] = field(default_factory=dict)
    failure: asyncio.Future[None] = field(init=False)  # never has a result, only the error that ends the run
    stopped: asyncio.Event = field(default_factory=asyncio.Event)  # Ctrl-C
    done: bool = False
    has_begun: bool = False  # before its first event a run neither submits nor writes
    _publications: list[_Publication] = field(default_factory=list)
    _newest: tuple[Path, int] | None = None  # checkpoint folder and step of the last commit
    _domains: dict[str, Domain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.failure = asyncio.get_running_loop().create_future()
        self._waits = {d.name: d.tool_wait for d in self.scenario.domains}
        self._domains = {d.name: get_domain(d.name) for d in self.scenario.domains}

    # --- the loop's three questions ------

    @property
    def is_ending(self) -> bool:
        """The scenario's stop is reached: nothing more is submitted."""
        return self.scenario.stop.reached(self.clock(), self.control.views.step, len(self.control.queue))

    def advance(self) -> None:
        """After anything happened, and now and then (`until_done`): take, train, submit, end. Safe at any time.

        So a head that is due to be parked is parked within a tick.
        """
        if not self.has_begun or self.is_over:
            return
        now, queue = self.clock(), self.control.queue
        self.control.take(now)
        while stale := queue.stale():
            for position in stale:
                self._kill_stale(position, now)
            self.control.take(now)
        positions = self.control.start_step(now, ending=self.is_ending)
        if positions:
            batch = self.pool.batch(positions)
            self.trainer.send("step", self.control.views.step + 1, positions, batch, self.fleet.oldest)
        while not self.is_ending and (domain := self.control.dispatch(self.clock())) is not None:
            self._submit(self._domains[domain])
        if self.is_ending and queue.open_items == 0 and self._all_published():
            self.done = True

    def _all_published(self) -> bool:
        """The last version of a run is always published, whatever the policy would wait for."""
        queue = self.control.queue
        if queue.published == len(queue.committed):
            return True
        if not self._publications and self._newest is not None:
            self._publish(*self._newest, "in_flight")
        return False

    # --- rollout ------

    def _submit(self, domain: Domain) -> None:
        position = len(self.control.queue)
        task = domain.task("train", self.scenario.seed, position)
        members = self.scenario.queue.group
        self.pool.put_task(position, asdict(task))
        self.control.submit(self.clock(), domain=domain.name, difficulty=task.difficulty, members=members)
        self.play(Group(position=position, attempt=0, task=task, members=members))

    def play(self, group: Group) -> None:
        """Start every member of an item; `take_outcome` hears of each."""
        self.groups[group.position] = group
        timeout = self.scenario.queue.item_timeout_s
        for member in range(group.members):
            trajectory = group.trajectory_id(member)
            self.backend.admit(
                OpenTrajectory(
                    id=trajectory,
                    sampling=self.sampling(group.task, trajectory),
                    position=group.position,
                    member=member,
                )
            )
            self.agents.send("play", trajectory, group.task, self._waits[group.task.domain], timeout)
        asyncio.get_running_loop().call_later(timeout + BACKSTOP_S, self._backstop, group)

    def sampling(self, task: Task, trajectory: str, temperature: float | None = None) -> Sampling:
        return Sampling(
            max_tokens=scaffold_of(self.scenario, trajectory).room(self._domains[task.domain].max_tokens),
            temperature=self.scenario.engine.temperature if temperature is None else temperature,
            stop_ids=self.stop_ids,
        )

    def take_outcome(self, outcome: Outcome) -> None:
        """A member ended. The last one of its group finishes the item, or buries it."""
        position, member, attempt = parse_trajectory(outcome.trajectory)
        opened = self.backend.close(outcome.trajectory)
        group = self.groups.get(position)
        if opened is None or group is None or group.attempt != attempt or member in group.ended:
            return  # of an earlier life, or after its backstop
        if outcome.reward is not None and not opened.completions:
            # Scored without a call of the model: there is nothing of the policy's to learn from.
            detail = "never called the model"
            outcome = replace(outcome, reward=None, reason=DeathReason.AGENT_CRASH, detail=detail)
        if opened.overdrawn is not None:
            outcome = replace(outcome, reward=None, reason=DeathReason.BUDGET, detail=opened.overdrawn)
        if outcome.turns == 0 and opened.measured is not None:  # of a program that nobody looks into
            seen = opened.measured
            outcome = replace(
                outcome,
                turns=seen.turns,
                tool_calls=outcome.tool_calls or seen.tool_calls,
                tool_wait_s=outcome.tool_wait_s or seen.tool_wait_s,
            )
        # How it ended is the launcher's to say; what it cannot know may have come over HTTP.
        outcome = replace(opened.report, reward=None, reason=None).outcome(outcome)
        now = self.clock()
        self._end_member(group, member, opened, outcome, now)
        if group.is_done:
            self._end_group(group, now)

    def _end_member(self, group: Group, member: int, opened: OpenTrajectory, outcome: Outcome, now: float) -> None:
        position, completions = group.position, tuple(opened.completions)
        trajectory = Trajectory(
            id=outcome.trajectory, position=position, member=member, completions=completions, outcome=outcome
        )
        forks = Counter(one.fork for one in completions if one.fork)
        self.control.account(
            ev.Conversed(t=now, position=position, member=member, forks=dict(forks), echoes=dict(opened.echoes))
        )
        group.ended[member] = trajectory
        self.pool.deliver(trajectory, attempt=group.attempt)
        self.control.account(
            ev.MemberDone(
                t=now,
                position=position,
                member=member,
                reward=outcome.reward,
                turns=outcome.turns,
                tokens=opened.tokens,
                tool_wait_s=outcome.tool_wait_s,
                reason=outcome.reason.value if outcome.reason else None,
            )
        )

    def _kill_stale(self, position: int, now: float) -> None:
        """A parked item that the head left behind: its agents are stopped; a finished one is dropped."""
        group = self.groups.pop(position, None)
        if group is None:
            tokens = self.pool.item(position).tokens or 0
        else:
            for member in group.missing():
                trajectory = group.trajectory_id(member)
                self.agents.send("cancel", trajectory)
                opened = self.backend.close(trajectory)
                assert opened is not None
                self._end_member(group, member, opened, left_behind(trajectory), now)
            tokens = group.tokens
        self.control.die(now, position, DeathReason.STALE, tokens=tokens)

    def _end_group(self, group: Group, now: float) -> None:
        del self.groups[group.position]
        self.control.finish(
            now, group.position, tokens=group.tokens, rewards=group.rewards, reason=group.commonest_death()
        )
        self.advance()

    def _backstop(self, group: Group) -> None:
        if self.groups.get(group.position) is group and not self.is_over:
            for member in group.missing():
                self.agents.send("cancel", group.trajectory_id(member))
                self.take_outcome(timed_out(group.trajectory_id(member)))

    # --- training and publication ------

    def take_step(self, stepped: Stepped) -> None:
        """The checkpoint is durable: commit, and ask when to publish."""
        self._newest = (stepped.folder, stepped.step)
        mode = self.control.commit(
            self.clock(),
            train_s=stepped.train_s,
            data_s=stepped.data_s,
            io_s=stepped.io_s,
            tokens=stepped.tokens,
            metrics=stepped.metrics,
        )
        self.account_usage()
        if mode is not None:
            self._publish(stepped.folder, stepped.step, mode)
        self.advance()

    def _publish(self, folder: Path, step: int, mode: SyncMode) -> None:
        self._publications.append(_Publication(step, step, len(self.control.queue.committed)))
        self.fleet.load(folder, step, mode)

    def account_usage(self) -> None:
        busy, steps, prefill, decode, cached = zip(*self.fleet.counters(), strict=True)
        self.control.account(
            ev.Usage(
                t=self.clock(),
                busy_s=busy,
                steps=steps,
                prefill_tokens=prefill,
                decode_tokens=decode,
                cached_tokens=cached,
            )
        )

    # --- what the fleet reports (FleetEvents) ------

    def _account_engine(self, event: ev.Event) -> None:
        """What an engine does before the run's first event, while an evaluation goes on say, is not the run's."""
        if self.has_begun:
            self.control.account(event)
            self._settle_publications()

    def instance_loaded(self, instance: int, version: int, seconds: float) -> None:
        self._account_engine(ev.Loaded(t=self.clock(), instance=instance, version=version, io_s=seconds))

    def instance_down(self, instance: int, reason: str) -> None:
        self._account_engine(ev.InstanceDown(t=self.clock(), instance=instance, reason=reason))

    def instance_up(self, instance: int, version: int) -> None:
        self._account_engine(ev.InstanceUp(t=self.clock(), instance=instance, version=version))

    def fail(self, error: Exception) -> None:
        """End the run with this error; the first one counts."""
        if not self.failure.done():
            self.failure.set_exception(error)

    @property
    def is_over(self) -> bool:
        return self.done or self.stopped.is_set() or self.failure.done()

    def _settle_publications(self) -> None:
        """A version is published when the slowest live engine serves it."""
        versions = self.fleet.versions()
        while self._publications and versions and min(versions) >= self._publications[0].version:
            due = self._publications.pop(0)
            self.control.publish(self.clock(), version=due.version, step=due.step, items=due.items)
        self.advance()

    def resume_items(self, running: list[tuple[int, int, Task]]) -> None:
        """Play again what ran when the last life ended: same positions, next attempt."""
        for position, attempt, task in running:
            assert self.control.queue.states[position] is ItemState.RUNNING
            self.play(Group(position=position, attempt=attempt, task=task, members=self.scenario.queue.group))
