"""A small seeded world that drives `forge.control.Control`: traces to test on, without simulator or live system.

It is written against the contract of `Control` alone, so it also shows what a world has to do. Seeded, in virtual
time: same arguments, same events.
"""

from __future__ import annotations

import copy
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forge import trace as ev
from forge.control import Control
from forge.policies import Policies
from forge.scenario import Scenario, parse
from forge.types import DeathReason


def scenario(**over: Any) -> Scenario:
    """A small scenario; keyword arguments replace whole top-level tables or keys."""
    data: dict[str, Any] = {
        "name": "tiny",
        "seed": 1,
        "stop": {"items": 60},
        "queue": {"n": 8, "batch": 4, "concurrency": 6, "group": 2},
        "policy": {"scheduler": {"kind": "windowed_fifo", "fraction": 0.5}},
        "domains": [{"name": "reasoning", "weight": 2.0}, {"name": "agent", "weight": 1.0}],
        "engine": {"instances": 2},
    }
    return parse(data | over, "test")


@dataclass
class World:
    """Runs `scenario.stop.items` items. `crashes`: seconds at which the process dies and a new life resumes."""

    scenario: Scenario
    seed: int = 0
    sinks: tuple[Callable[[ev.Event], None], ...] = ()
    death_rate: float = 0.08
    mtbf_s: float = 40.0
    crashes: tuple[float, ...] = ()
    world: str = "live"
    now: float = 0.0
    control: Control = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.open: dict[int, dict[int, float | None]] = {}  # position -> member -> reward
        self.tokens: dict[int, int] = {}
        self.in_flight: dict[str, tuple[int, Callable[[], None]]] = {}  # request -> instance, retry
        self.usage: list[list[float]] = []
        self.syncing = False
        self.control = self._new_control()

    def _new_control(self) -> Control:
        self.usage = [[0.0, 0, 0, 0] for _ in range(self.scenario.engine.instances)]
        return Control(
            policies=fresh(self.scenario),
            shape=self.scenario.shape(),
            instances=self.scenario.engine.instances,
            group=self.scenario.queue.group,
            seed=self.scenario.seed,
            mix=self.scenario.mix(),
            concurrency=self.scenario.queue.concurrency,
            sinks=self.sinks,
        )

    # --- the loop ------

    def run(self) -> None:
        started = ev.RunStarted(
            t=0.0, schema=ev.SCHEMA, world=self.world, scenario=self.scenario.name, seed=self.scenario.seed
        )
        self.control.account(started)
        self.control.account(ev.Evaluated(t=0.0, step=0, label="start", mean=0.2, tasks=50))
        self._begin_life()
        crashes = list(self.crashes)
        while self.heap and not self._over():
            t, _, act = heapq.heappop(self.heap)
            if crashes and t > crashes[0]:
                self.now = crashes.pop(0)
                self._crash()
                continue
            self.now = t
            act()
            self._advance()
        self._report_usage()
        end = self.control.views.step
        self.control.account(ev.Evaluated(t=self.now, step=end, label="end", mean=0.6, tasks=50))
        self.control.account(ev.RunEnded(t=self.now, reason="done"))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + seconds, self.count, act))

    def _begin_life(self) -> None:
        self._advance()
        self._after(2.0, self._tick)
        for instance in range(self.scenario.engine.instances):
            self._after(self.rng.expovariate(1 / self.mtbf_s), lambda i=instance: self._down(i))

    def _over(self) -> bool:
        queue = self.control.queue
        return self._all_submitted() and queue.open_items == 0 and queue.published == len(queue.committed)

    def _all_submitted(self) -> bool:
        return len(self.control.queue) >= (self.scenario.stop.items or 0)

    def _advance(self) -> None:
        """After every event: take, train, submit, as far as each goes."""
        queue = self.control.queue
        self._take()
        ending = self._all_submitted() and not queue.waiting()
        if batch := self.control.start_step(self.now, ending=ending):
            self._after(0.3 + 0.02 * len(batch), lambda at=self.now: self._trained(at))
            self._take()
        while not self._all_submitted() and (domain := self.control.dispatch(self.now)) is not None:
            position = self.control.submit(
                self.now, domain=domain, difficulty=float(domain == "agent"), members=self.scenario.queue.group
            )
            self._start(position)
        if self._all_submitted() and queue.open_items == 0 and queue.published < len(queue.committed):
            self._sync()

    def _take(self) -> None:
        self.control.take(self.now)
        while stale := self.control.queue.stale():
            for position in stale:
                self._die(position, DeathReason.STALE)
            self.control.take(self.now)

    # --- rollout ------

    def _start(self, position: int) -> None:
        self.open[position] = {}
        self.tokens[position] = 0
        if (due := self.control.park_due(position)) is not None:
            self._after(max(0.0, due - self.now) + 1e-9, lambda: None)  # `_advance` asks
        for member in range(self.scenario.queue.group):
            self._turn(position, member, 0, self.rng.choice([1, 1, 2, 3]))
        if self.rng.random() < self.death_rate:
            self._after(self.rng.uniform(0.1, 3.0), lambda: self._die(position))

    def _turn(self, position: int, member: int, turn: int, turns: int) -> None:
        """Send one request; it completes, waits for its tool, and the next turn begins."""
        if position not in self.open:
            return
        if not self._live():
            self._after(0.5, lambda: self._turn(position, member, turn, turns))
            return
        retry_s = self.control.refuse(self.now, position=position, member=member, turn=turn)
        if retry_s is not None:
            self._after(retry_s, lambda: self._turn(position, member, turn, turns))
            return
        self.count += 1
        request = f"{position}.{member}.{turn}.{self.count}"
        prompt = 20 + 30 * turn
        instance = self.control.route(
            self.now, request=request, position=position, member=member, turn=turn, prompt_tokens=prompt
        )
        tokens = 1 + int(self.rng.lognormvariate(2.5, 0.8))
        self.in_flight[request] = (instance, lambda: self._turn(position, member, turn, turns))
        first = self.rng.uniform(0.01, 0.05)
        self._after(first, lambda: self._first(request))
        self._after(first + 0.02 * tokens, lambda: self._completed(request, prompt, tokens, member, turn, turns))

    def _first(self, request: str) -> None:
        if request in self.in_flight:
            self.control.account(ev.FirstToken(t=self.now, request=request))

    def _completed(self, request: str, prompt: int, tokens: int, member: int, turn: int, turns: int) -> None:
        if request not in self.in_flight:
            return
        position = int(request.split(".")[0])
        instance, _ = self.in_flight.pop(request)
        version = self.control.views.version
        self.control.account(
            ev.Completed(t=self.now, request=request, tokens=tokens, finish="stop", versions=(version, version))
        )
        for slot, amount in enumerate((0.004 * tokens, tokens, prompt, tokens)):
            self.usage[instance][slot] += amount
        self.tokens[position] += tokens
        wait = self.rng.lognormvariate(-2, 1)
        if turn + 1 < turns:
            self._after(wait, lambda: self._turn(position, member, turn + 1, turns))
        else:
            self._member_done(position, member, turns, tokens, wait)

    def _member_done(self, position: int, member: int, turns: int, tokens: int, wait: float) -> None:
        died = self.rng.random() < 0.05
        learned = min(0.9, 0.2 + 0.05 * self.control.views.step)
        reward = None if died else float(self.rng.random() < learned)
        self.control.account(
            ev.MemberDone(
                t=self.now,
                position=position,
                member=member,
                reward=reward,
                turns=turns,
                tokens=tokens,
                tool_wait_s=wait,
                reason="agent_crash" if died else None,
            )
        )
        self.open[position][member] = reward
        if len(self.open[position]) == self.scenario.queue.group:
            rewards = [r for r in self.open.pop(position).values() if r is not None]
            self.control.finish(self.now, position, tokens=self.tokens[position], rewards=rewards)

    def _die(self, position: int, reason: DeathReason = DeathReason.TIMEOUT) -> None:
        if self.open.pop(position, None) is None and reason is DeathReason.TIMEOUT:
            return  # it has ended
        self._cancel(lambda request, _: request.startswith(f"{position}."))
        self.control.die(self.now, position, reason, tokens=self.tokens[position])

    def _cancel(self, which: Callable[[str, int], bool]) -> list[Callable[[], None]]:
        gone = [r for r, (instance, _) in self.in_flight.items() if which(r, instance)]
        for request in gone:
            self.control.account(
                ev.Completed(t=self.now, request=request, tokens=0, finish="cancelled", versions=(0, 0))
            )
        return [self.in_flight.pop(request)[1] for request in gone]

    def _live(self) -> bool:
        return bool(self.control.views.instances.views())

    def _down(self, instance: int) -> None:
        retries = self._cancel(lambda _, at: at == instance)
        self.control.account(ev.InstanceDown(t=self.now, instance=instance, reason="crash"))
        for retry in retries:
            retry()
        self._after(1.0, lambda: self._up(instance))

    def _up(self, instance: int) -> None:
        self.control.account(ev.InstanceUp(t=self.now, instance=instance, version=self.control.views.version))
        self._after(self.rng.expovariate(1 / self.mtbf_s), lambda: self._down(instance))

    # --- training and weights ------

    def _trained(self, started: float) -> None:
        positions = self.control.queue.training
        mode = self.control.commit(
            self.now,
            train_s=self.now - started - 0.05,
            data_s=0.02,
            io_s=0.03,
            tokens=sum(self.tokens.get(p, 0) for p in positions),
            metrics={"update_variance": self.rng.uniform(0.5, 1.5)},
        )
        if mode is not None:
            self._sync()

    def _sync(self) -> None:
        if self.syncing:
            return
        self.syncing = True
        step, items = self.control.views.step, len(self.control.queue.committed)
        self._after(0.1, lambda: self._load(step, items))

    def _load(self, step: int, items: int) -> None:
        version = self.control.views.version + 1
        for seen in self.control.views.instances.views():
            self.control.account(ev.Loaded(t=self.now, instance=seen.instance, version=version, io_s=0.04))
        self.control.publish(self.now, version=version, step=step, items=items)
        self.syncing = False
        if self.control.views.step - step >= self.scenario.policy.sync.publish_every:
            self._sync()

    def _tick(self) -> None:
        self._report_usage()
        self._after(2.0, self._tick)

    def _report_usage(self) -> None:
        busy, steps, prefill, decode = zip(*self.usage, strict=True)
        self.control.account(
            ev.Usage(
                t=self.now,
                busy_s=busy,
                steps=tuple(map(int, steps)),
                prefill_tokens=tuple(map(int, prefill)),
                decode_tokens=tuple(map(int, decode)),
            )
        )

    # --- death of the process ------

    def _crash(self) -> None:
        """kill -9: everything but the queue is gone; taken and uncommitted items return, running ones restart."""
        old = self.control
        self.heap.clear()
        self.in_flight.clear()
        self.open.clear()
        self.syncing = False
        lost = old.queue.roll_back()
        items = {str(p): (i.domain, i.submitted_s, i.finished_s) for p, i in old.views.items.items()}
        self.control = self._new_control()
        self.control.resume(
            ev.Resumed(
                t=self.now,
                life=old.life + 1,
                queue=old.queue.to_dict(),
                items=items,
                step=old.views.step,
                version=old.views.version,
                published_step=old.views.published_step,
            )
        )
        self.control.account(ev.RolledBack(t=self.now, positions=tuple(lost)))
        for position in [p for p in self.control.queue.waiting() if p not in self.control.queue.finished_order]:
            self._start(position)
        self._begin_life()
        if self.control.queue.published < len(self.control.queue.committed):
            self._sync()


def fresh(given: Scenario) -> Policies:
    """A run's own policies: nothing it changes in them reaches the scenario."""
    return copy.deepcopy(given.policy)


def trace_of(given: Scenario, **options: Any) -> list[ev.Event]:
    """The events of one run of `World`."""
    events: list[ev.Event] = []
    World(given, sinks=(events.append,), **options).run()
    return events
