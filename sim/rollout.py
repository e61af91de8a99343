"""The rollout side of a training run: requests routed to instances, completions accounted, crashes, weights loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from forge import trace as ev
from forge.control import Control, Served
from forge.policies.kv import Lru
from forge.policies.sync import SyncMode
from forge.scenario import Scenario
from sim.clock import to_fs, to_s
from sim.engine import Load
from sim.front import Front
from sim.machines import machines
from sim.request import Request
from sim.sessions import Path, Step
from sim.signals import Report, Signals
from sim.uses import Uses

_CRASHES = 1 << 21  # spawn key of the crash times


class Call:
    """A request under way. `answer` is called with it when it has `left` its instance: `lost` when that crashed and it
    must be sent again. `about` is for whoever sent it. `first_s`: when its first token came. `cached` of its `prompt`
    tokens were believed to be there."""

    __slots__ = (
        "about",
        "answer",
        "cached",
        "first_s",
        "instance",
        "left",
        "lost",
        "position",
        "prompt",
        "request",
        "routed_s",
    )

    def __init__(
        self, request: Request, instance: int, position: int, answer: Callable[[Call], None], about: Any
    ) -> None:
        self.request = request
        self.instance = instance
        self.position = position
        self.answer = answer
        self.about = about
        self.left = self.lost = False
        self.first_s: float | None = None
        self.routed_s = 0.0
        self.prompt = self.cached = 0
        request.owner = self


class Rollout:
    """`on_change` is called when an instance has loaded a version, gone down or come up."""

    def __init__(self, env: Any, control: Control, scenario: Scenario, on_change: Callable[[], None]) -> None:
        self.env = env
        self._control = control
        self._requests = control.requests
        self._sim = scenario.sim
        later = scenario.sim.cached_share_later
        self._cached = (scenario.sim.cached_share, scenario.sim.cached_share if later is None else later)
        self._on_change = on_change
        made = machines(scenario)
        self._fleet = made.before(env, self)
        self._instances = made.instances
        self._front = made.front  # the first ones are routed to, and all that the control loop knows
        self._live = [True] * len(made.instances)
        self._lives = self._front  # how many of the first ones live
        self._found = [0] * len(made.instances)  # prompt tokens that were cached, by where their request was sent
        self._block = scenario.sim.block
        signals = scenario.sim.signals
        self._signals = None
        self._load = self._requests is None or control.policies.router.reads_load  # a trace keeps what was reported
        if signals is not None:
            times = signals.period_s, signals.delay_s
            self._signals = Signals(env, self._fleet, *times, self._on_report, load=self._load)
        kv = control.policies.kv
        self._uses = None if isinstance(kv, Lru) else Uses(kv, self._fleet.forget)
        self._target = 0  # newest version to serve: what an instance loads when it comes up
        self._back: list[Callable[[], None]] = []  # to be called when an instance comes up
        if scenario.sim.instance_mtbf_s is not None:
            for i in range(len(made.instances)):
                env.process(self._break_down(i, scenario.seed, scenario.sim.instance_mtbf_s))

    # --- requests ------

    @property
    def fleet(self) -> Front:
        """All instances, behind the ones that are routed to."""
        return self._fleet

    @property
    def lives(self) -> bool:
        """Whether there is an instance to send a request to."""
        return self._lives > 0

    def when_live(self, send: Callable[[], None]) -> None:
        """Call `send` once an instance has come up, where none lives."""
        self._back.append(send)

    def send(
        self,
        name: str,
        position: int,
        member: int,
        turn: int,
        step: Step,
        answer: Callable[[Call], None],
        about: Any = None,
    ) -> Call:
        """Route a request and queue it at its instance."""
        now, cached = self._now(), 0
        path: Path = ()
        if self._signals is not None:
            self._signals.refresh()
            path = step.path
        if self._requests is not None:
            chosen, cached = self._control.route_unseen(now, name, f"{position}.{member}", turn, step.prompt, path)
        else:
            chosen = self._control.route(
                now, request=name, position=position, member=member, turn=turn, prompt_tokens=step.prompt, path=path
            )
        if self._uses is not None:
            self._uses.asks((position, member), step.path)
        prompt = max(1, round(step.prompt * (1.0 - self._cached[turn > 0]))) if not step.path else step.prompt
        request = Request(name, prompt, step.output, step.path, keep=step.keep)
        self._instances[chosen].check(request)
        call = Call(request, chosen, position, answer, about)
        call.routed_s, call.prompt, call.cached = now, step.prompt, cached
        self._fleet.add(chosen, request)
        return call

    def cancel(self, call: Call) -> None:
        if not call.left and self._fleet.cancel(call.instance, call.request):
            call.request.cancelled = True
            self._end(call, "cancelled")

    def over(self, position: int, member: int) -> None:
        """The trajectory asks no more."""
        if self._uses is not None:
            self._uses.over((position, member))

    # --- weights ------

    def load(self, version: int, mode: SyncMode) -> None:
        """Every live instance loads `version`; one that is down does so when it comes up."""
        self._target = version
        load = Load(version, to_fs(self._sim.load_s), mode)
        for i in self._live_ids():
            self._fleet.load(i, load)

    def served(self) -> int | None:
        """The version of the slowest live instance; None while all that requests are routed to are down."""
        if not self.lives:
            return None
        return min(self._instances[i].version for i in self._live_ids())

    def usage(self) -> ev.Usage:
        counters = [instance.usage(self.env.now) for instance in self._instances]
        return ev.Usage(
            t=self._now(),
            busy_s=tuple(to_s(c.busy_fs) for c in counters),
            steps=tuple(c.iterations for c in counters),
            prefill_tokens=tuple(c.prefill_tokens for c in counters),
            decode_tokens=tuple(c.sampled_tokens for c in counters),
            cached_tokens=tuple(self._found),
        )

    # --- inside ------

    def _now(self) -> float:
        return to_s(self.env.now)

    def _live_ids(self) -> list[int]:
        return [i for i, live in enumerate(self._live) if live]

    def _on_report(self, report: Report) -> None:
        free_tokens = report.free_blocks * self._block
        if self._requests is not None:
            views = self._control.views.instances
            if self._load:
                load = report.running, report.waiting, free_tokens, report.queued_tokens, report.queued_pairs
                views.reported(report.instance, report.seen_s, *load)
            views.stored(report.instance, report.chains)
            return
        self._control.account(
            ev.Reported(
                t=self._now(),
                instance=report.instance,
                running=report.running,
                waiting=report.waiting,
                free_tokens=free_tokens,
                chains=report.chains,
                seen_s=report.seen_s,
                queued_tokens=report.queued_tokens,
                queued_pairs=report.queued_pairs,
            )
        )

    def on_first_token(self, instance: int, request: Request) -> None:  # noqa: ARG002 - the listener's signature
        now, call = self._now(), request.owner
        call.first_s = now
        self._found[call.instance] += (request.hit or 0) + call.prompt - request.prompt
        if self._requests is None:
            self._control.account(ev.FirstToken(t=now, request=request.id))
        else:
            self._control.views.instances.first_token(request.id, now)

    def on_end(self, instance: int, request: Request) -> None:  # noqa: ARG002 - the listener's signature
        cancelled = request.cancelled and request.sampled < request.output
        self._end(request.owner, "cancelled" if cancelled else "stop")

    def on_loaded(self, instance: int, version: int) -> None:
        if instance < self._front:
            self._control.account(ev.Loaded(t=self._now(), instance=instance, version=version, io_s=self._sim.load_s))
        self._on_change()

    def _end(self, call: Call, finish: str) -> None:
        request, now, tokens = call.request, self._now(), call.request.sampled
        call.left = True
        request.owner = None  # else the two keep each other alive until the collector comes
        if self._requests is None:
            versions = request.versions
            done = ev.Completed(t=now, request=request.id, tokens=tokens, finish=finish, versions=versions)
            self._control.account(done)
        else:
            self._control.views.instances.completed(request.id, now)
            served = Served(
                call.position,
                call.prompt,
                call.cached,
                call.routed_s,
                call.first_s,
                now,
                tokens,
                finish,
                request.versions[0],
            )
            self._requests(served)
        call.answer(call)

    # --- crashes ------

    def _break_down(self, i: int, seed: int, mtbf_s: float) -> Any:
        """Process of one instance: exponential times between failures, then repair. The same in every policy's run."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(_CRASHES, i))))
        while True:
            yield self.env.timeout(max(1, to_fs(mtbf_s * float(rng.standard_exponential()))))
            self._crash(i)
            yield self.env.timeout(max(1, to_fs(self._sim.instance_repair_s)))
            self._come_up(i)

    def _crash(self, i: int) -> None:
        self._set_live(i, False)
        lost = self._fleet.crash(i)
        for request in lost:
            request.owner.lost = True
            request.sampled = 0
            self._end(request.owner, "lost")
        if i < self._front:
            self._control.account(ev.InstanceDown(t=self._now(), instance=i, reason="crash"))
        self._on_change()

    def _come_up(self, i: int) -> None:
        self._set_live(i, True)
        self._fleet.up(i, self._target)
        if i < self._front:
            self._control.account(ev.InstanceUp(t=self._now(), instance=i, version=self._target))
        waiting, self._back = (self._back, []) if self.lives else ([], self._back)
        for send in waiting:
            send()
        self._on_change()

    def _set_live(self, i: int, live: bool) -> None:
        self._live[i] = live
        if i < self._front:
            self._lives += 1 if live else -1
