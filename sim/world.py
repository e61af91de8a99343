"""The simulated world: it drives the control loop of the live system in virtual time. `simulate` is the way in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import simpy

from forge import trace as ev
from forge.control import Control, Requests, Sink
from forge.scenario import Scenario
from sim import garbage
from sim.agents import Agents
from sim.clock import to_fs, to_s
from sim.machines import hits
from sim.rollout import Rollout
from sim.trainer import Publisher, Trainer
from sim.work import Work
from sim.workload import work_of


class SimError(RuntimeError):
    """The simulated run came to a standstill: a policy waits for something that cannot happen."""


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run. `events` are all but the policy calls, which only sinks receive (they cost most of the time)."""

    scenario: Scenario
    control: Control
    events: list[ev.Event]


def simulate(
    scenario: Scenario, sinks: tuple[Sink, ...] = (), work: Work | None = None, *, requests: Requests | None = None
) -> Run:
    """Run a scenario to its end. The same scenario gives the same events, to the byte.

    Raises ForgeError where items do nothing but die.
    `work` saves drawing the work again where several policies meet the same. With `requests` no event is kept, and
    requests make none (`forge.control.Control`): a run of any length in little memory.
    """
    return World(scenario, sinks, work or work_of(scenario), requests).run()


class _Recorder(Control):
    """Keeps every event but the policy calls; without sinks those are not even made."""

    events: list[ev.Event]

    def account(self, event: ev.Event) -> None:
        super().account(event)
        if self.requests is None and not isinstance(event, ev.PolicyCall):
            self.events.append(event)


class World:
    """Decide, act, account: whenever something happened, `_settle` lets the control loop decide what follows."""

    def __init__(self, scenario: Scenario, sinks: tuple[Sink, ...], work: Work, requests: Requests | None) -> None:
        self._scenario = scenario
        self._env: Any = simpy.Environment()
        self._control = _Recorder(
            policies=scenario.policy.fresh(),
            shape=scenario.shape(),
            instances=scenario.engine.instances,
            group=scenario.queue.group,
            seed=scenario.seed,
            sinks=sinks,
            block=scenario.sim.block,
            mix=scenario.mix(),
            concurrency=scenario.queue.concurrency,
            requests=requests,
        )
        self._control.events = []
        self._rollout = Rollout(self._env, self._control, scenario, self._on_instances)
        self._publisher = Publisher(self._env, self._control, self._rollout)
        self._agents = Agents(self._env, self._control, self._rollout, scenario, work, self._settle)
        self._trainer = Trainer(self._env, self._control, self._rollout, self._publisher, scenario.sim, self._settle)
        self._stopping = False
        self._ended = False

    def run(self) -> Run:
        scenario, control = self._scenario, self._control
        started = ev.RunStarted(t=0.0, schema=ev.SCHEMA, world="sim", scenario=scenario.name, seed=scenario.seed)
        control.account(started)
        if scenario.stop.seconds is not None:
            bell = self._env.timeout(to_fs(scenario.stop.seconds))
            bell.callbacks.append(lambda _: self._settle())
        self._settle()
        step = self._env.step
        with garbage.seldom():
            while not self._ended:
                step()
        control.account(self._rollout.usage())
        if (found := hits(self._rollout.fleet)) is not None:
            at = {"l1": found.l1, "l2": found.l2, "l3": found.l3, "missed": found.missed}
            control.account(ev.KvHits(t=self._now(), **at))
        control.account(ev.RunEnded(t=self._now(), reason="done"))
        return Run(scenario, control, control.events)

    def _now(self) -> float:
        return to_s(self._env.now)

    def _on_instances(self) -> None:
        self._publisher.check()
        self._settle()

    def _settle(self) -> None:
        """Take, train, submit, and see whether the run is over."""
        self._stopping = self._stopping or self._reached_stop()
        while True:
            self._take()
            batch = self._control.start_step(self._now(), ending=self._stopping)
            if not batch:
                break
            self._trainer.train(sum(self._agents.train_tokens.pop(p) for p in batch))
        while not self._stopping and (domain := self._control.dispatch(self._now())) is not None:
            self._agents.submit(domain)
            self._stopping = self._reached_stop()
        if self._stopping and self._control.queue.open_items == 0:
            self._finish()
        elif self._stuck():
            raise SimError(f"standstill at {self._now()} s: {self._control.queue.open_items} items are open")

    def _take(self) -> None:
        """Take what the scheduler wants; what it left behind dies."""
        control = self._control
        control.take(self._now())
        while stale := control.queue.stale():
            for position in stale:
                self._agents.kill_stale(position)
            control.take(self._now())

    def _reached_stop(self) -> bool:
        control = self._control
        return self._scenario.stop.reached(self._now(), control.views.step, len(control.queue))

    def _stuck(self) -> bool:
        """Nothing is under way that could change the queue. Asked, because crashes and repairs go on for ever."""
        queue, views = self._control.queue, self._control.views
        under_way = queue.running or queue.training or self._publisher.newest > views.published_step
        return not under_way and (self._stopping or self._scenario.stop.seconds is None)

    def _finish(self) -> None:
        """All work is committed: the last version is published, unasked, and the run ends."""
        views = self._control.views
        if self._publisher.newest < views.step:
            self._publisher.publish("in_flight")
        elif views.published_step == views.step:
            self._ended = True
