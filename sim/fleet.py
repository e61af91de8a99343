"""All rollout instances of a run in SimPy: requests in, completions out, crashes, weights loads.

An instance has one SimPy event per span of iterations, never one per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge import trace as ev
from forge.control import Control
from forge.policies.sync import SyncMode
from forge.scenario import Scenario
from sim.clock import to_ns, to_s
from sim.engine import Cost, Instance, Load, Request

LAST = 2  # after SimPy's URGENT and NORMAL: instances plan once every arrival of their instant is in
_CRASHES = 1 << 21  # spawn key of the crash times


@dataclass(slots=True, eq=False)
class Call:
    """A request under way. `answered` succeeds with it: `lost` when its instance crashed and it must be sent again."""

    request: Request
    instance: int
    answered: Any  # simpy.Event
    lost: bool = False


class Fleet:
    """`on_change` is called when an instance has loaded a version, gone down or come up."""

    def __init__(self, env: Any, control: Control, scenario: Scenario, on_change: Callable[[], None]) -> None:
        self.env = env
        self._control = control
        self._sim = scenario.sim
        self._on_change = on_change
        count = scenario.engine.instances
        self._instances = [Instance(Cost.of(scenario.sim), scenario.engine.slots) for _ in range(count)]
        self._live = [True] * count
        self._planned: list[int | None] = [None] * count  # when the newest wake-up of each is due
        self._calls: list[dict[str, Call]] = [{} for _ in range(count)]
        self._target = 0  # newest version to serve: what an instance loads when it comes up
        self._back: Any = env.event()  # succeeds, and is renewed, when an instance comes up
        if scenario.sim.instance_mtbf_s is not None:
            for i in range(count):
                env.process(self._break_down(i, scenario.seed, scenario.sim.instance_mtbf_s))

    # --- requests ------

    def wait_live(self) -> Any:
        """A SimPy event to wait for before sending, or None while some instance lives."""
        return None if any(self._live) else self._back

    def send(self, *, request: str, position: int, member: int, turn: int, prompt_tokens: int, tokens: int) -> Call:
        """Route a request and queue it at its instance."""
        now: int = self.env.now
        chosen = self._control.route(
            to_s(now), request=request, position=position, member=member, turn=turn, prompt_tokens=prompt_tokens
        )
        prefill = max(1, round(prompt_tokens * (1.0 - self._sim.cached_share)))
        call = Call(Request(request, prefill, tokens), chosen, self.env.event())
        self._calls[chosen][request] = call
        self._instances[chosen].add(call.request, now)
        self._wake(chosen)
        return call

    def cancel(self, call: Call) -> None:
        if call.request.id not in self._calls[call.instance]:
            return  # it has ended
        if self._instances[call.instance].cancel(call.request, self.env.now):
            call.request.cancelled = True
            self._end(call, "cancelled")
        self._wake(call.instance)

    # --- weights ------

    def load(self, version: int, mode: SyncMode) -> None:
        """Every live instance loads `version`; one that is down does so when it comes up."""
        self._target = version
        for i in self._live_ids():
            self._instances[i].load(Load(version, to_ns(self._sim.load_s), mode == "drain"), self.env.now)
            self._wake(i)

    def served(self) -> int | None:
        """The version of the slowest live instance; None while all are down."""
        return min((self._instances[i].version for i in self._live_ids()), default=None)

    def usage(self) -> ev.Usage:
        now: int = self.env.now
        counters = [instance.usage(now) for instance in self._instances]
        return ev.Usage(
            t=to_s(now),
            busy_s=tuple(to_s(c.busy_ns) for c in counters),
            steps=tuple(c.steps for c in counters),
            prefill_tokens=tuple(c.prefill_tokens for c in counters),
            decode_tokens=tuple(c.decode_tokens for c in counters),
        )

    # --- inside ------

    def _live_ids(self) -> list[int]:
        return [i for i, live in enumerate(self._live) if live]

    def _wake(self, i: int) -> None:
        """See that `_advance(i)` runs when the instance is due. Wake-ups that came to nothing are ignored."""
        due = self._instances[i].due()
        if due is None or due == self._planned[i]:
            return
        self._planned[i] = due
        event = self.env.event()
        event._ok, event._value = True, None  # a Timeout whose priority we choose
        event.callbacks.append(lambda _: self._advance(i))
        self.env.schedule(event, priority=LAST, delay=due - self.env.now)

    def _advance(self, i: int) -> None:
        instance, now = self._instances[i], self.env.now
        if instance.due() != now or not self._live[i]:
            return
        self._planned[i] = None
        progress = instance.advance(now)
        for request in progress.first_tokens:
            self._control.account(ev.FirstToken(t=to_s(now), request=request.id))
        for request in progress.ended:
            cancelled = request.cancelled and request.sampled < request.tokens
            self._end(self._calls[i][request.id], "cancelled" if cancelled else "stop")
        self._wake(i)
        if progress.loaded is not None:
            self._control.account(ev.Loaded(t=to_s(now), instance=i, version=progress.loaded, io_s=self._sim.load_s))
            self._on_change()

    def _end(self, call: Call, finish: str) -> None:
        request = call.request
        del self._calls[call.instance][request.id]
        self._control.account(
            ev.Completed(
                t=to_s(self.env.now),
                request=request.id,
                tokens=request.sampled,
                finish=finish,
                versions=request.versions,
            )
        )
        call.answered.succeed(call)

    def _break_down(self, i: int, seed: int, mtbf_s: float) -> Any:
        """Process of one instance: exponential times between failures, then repair. The same in every policy's run."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_CRASHES, i))))
        while True:
            yield self.env.timeout(max(1, to_ns(mtbf_s * float(rng.standard_exponential()))))
            self._crash(i)
            yield self.env.timeout(max(1, to_ns(self._sim.instance_repair_s)))
            self._come_up(i)

    def _crash(self, i: int) -> None:
        now = self.env.now
        for request in self._instances[i].crash(now):
            call = self._calls[i][request.id]
            call.lost = True
            request.sampled = 0
            self._end(call, "lost")
        self._live[i], self._planned[i] = False, None
        self._control.account(ev.InstanceDown(t=to_s(now), instance=i, reason="crash"))
        self._on_change()

    def _come_up(self, i: int) -> None:
        self._live[i] = True
        self._instances[i].version = self._target
        self._control.account(ev.InstanceUp(t=to_s(self.env.now), instance=i, version=self._target))
        self._back.succeed()
        self._back = self.env.event()
        self._on_change()
