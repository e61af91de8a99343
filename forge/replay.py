"""Replay: the proof that a run's decisions follow from its trace (DESIGN section 3, rules 2 and 7).

`replay_policies` repeats every traced policy call on a fresh policy, with views folded from the trace again.
`replay_driver` feeds what happened into a fresh `Control` and expects what it decided and accounted for, event by
event: the driver both worlds share, led by one world's events, does what it did there. `replay` is both, of a folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge import trace as ev
from forge.control import Control, fingerprint
from forge.draws import draw
from forge.queue import QueueError
from forge.runs import RunFolder
from forge.scenario import Scenario
from forge.views import Views


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a replay left the trace. `event` counts from 1, as lines of `trace.jsonl` do."""

    event: int
    what: str
    traced: str
    replayed: str

    def __str__(self) -> str:
        return f"event {self.event}: {self.what}: traced {self.traced}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """`difference` None: the trace replays. Counts are up to the first difference. `ended`: its last event is the
    run's end; otherwise the run was cut, or still goes on."""

    events: int
    calls: int
    lives: int
    ended: bool
    difference: Difference | None = None

    @property
    def is_same(self) -> bool:
        return self.difference is None


class _DifferenceFoundError(Exception):
    def __init__(self, what: str, traced: object, replayed: object) -> None:
        super().__init__(what)
        self.what, self.traced, self.replayed = what, str(traced), str(replayed)


def replay(folder: RunFolder | Path) -> ReplayResult:
    """Both replays of a run folder; the first difference of either. Raises ForgeError where it cannot be read."""
    run = folder if isinstance(folder, RunFolder) else RunFolder.open(folder)
    scenario = run.scenario()
    events = list(run.events())
    result = replay_policies(events, scenario)
    return result if not result.is_same else replay_driver(events, scenario)


def replay_policies(events: Iterable[ev.Event], scenario: Scenario) -> ReplayResult:
    """Fold the trace, and at every policy call compare draw, view and decision with a fresh policy's."""
    return _run(_PolicyReplay(scenario), list(events))


def replay_driver(events: Iterable[ev.Event], scenario: Scenario) -> ReplayResult:
    """Lead a fresh `Control` through the trace and compare every event it makes."""
    return _run(_DriverReplay(scenario), list(events))


def _run(replayer: _PolicyReplay | _DriverReplay, events: list[ev.Event]) -> ReplayResult:
    done, calls, lives = 0, 0, 1
    ended = bool(events) and isinstance(events[-1], ev.RunEnded)
    try:
        while done < len(events):
            count = replayer.step(events, done)
            calls += sum(isinstance(e, ev.PolicyCall) for e in events[done : done + count])
            lives += sum(isinstance(e, ev.Resumed) for e in events[done : done + count])
            done += count
    except _DifferenceFoundError as found:
        at = done + replayer.offset + 1
        difference = Difference(event=at, what=found.what, traced=found.traced, replayed=found.replayed)
        return ReplayResult(events=done, calls=calls, lives=lives, ended=ended, difference=difference)
    except (QueueError, ev.TraceError, KeyError, IndexError) as error:
        kind = f"{events[done].e} is illegal here"
        difference = Difference(event=done + 1, what=kind, traced=ev.encode(events[done])[:200], replayed=str(error))
        return ReplayResult(events=done, calls=calls, lives=lives, ended=ended, difference=difference)
    return ReplayResult(events=done, calls=calls, lives=lives, ended=ended)


class _PolicyReplay:
    """One event at a time: check a policy call, then fold."""

    offset = 0

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._views = Views(
            scenario.shape(),
            scenario.engine.instances,
            scenario.sim.block,
            scenario.mix(),
            scenario.queue.concurrency,
        )
        self._begin_life(0)

    def _begin_life(self, life: int) -> None:
        self._life, self._calls = life, 0
        self._policies = self._scenario.policy.fresh().slots()

    def step(self, events: list[ev.Event], at: int) -> int:
        event = events[at]
        match event:
            case ev.RunStarted():
                _same("schema, and with it what views hold", event.schema, ev.SCHEMA)
                _same("seed", event.seed, self._scenario.seed)
            case ev.Resumed():
                self._begin_life(event.life)
            case ev.PolicyCall():
                self._check(event)
        self._views.apply(event)
        return 1

    def _check(self, call: ev.PolicyCall) -> None:
        name = f"{call.slot}.{call.method}"
        _same(f"draw of {name}", call.draw, draw(self._scenario.seed, self._life, self._calls))
        self._calls += 1
        self._views.now = call.t
        view = self._views.view(call.slot, call.draw, call.args)
        _same(f"view of {name}", call.view, fingerprint(view))
        decision = getattr(self._policies[call.slot], call.method)(view)
        _same(f"decision of {name}", json.dumps(call.decision), json.dumps(decision))


class _DriverReplay:
    """What happened goes in; what `Control` makes of it must be the next events of the trace.

    The world decides when it asks (`take`, `start_step`, `route`, ...), so the first event of an answer stands for
    the question; everything in the answer, and that it ends there, is the driver's.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._made: list[ev.Event] = []
        self._control = self._fresh()
        self.offset = 0  # of the event that differs, from the first of its answer

    def _fresh(self) -> Control:
        scenario = self._scenario
        return Control(
            policies=scenario.policy.fresh(),
            shape=scenario.shape(),
            instances=scenario.engine.instances,
            group=scenario.queue.group,
            seed=scenario.seed,
            sinks=(self._made.append,),
            block=scenario.sim.block,
            mix=scenario.mix(),
            concurrency=scenario.queue.concurrency,
        )

    def step(self, events: list[ev.Event], at: int) -> int:
        self._made.clear()
        if isinstance(events[at], ev.PolicyCall) and _is_cut(events, at + 1):
            return 1  # killed before it could act on the decision, which the policy replay has checked
        self._ask(events, at)
        for offset, made in enumerate(self._made):
            if offset and _is_cut(events, at + offset):
                self.offset = 0
                return offset
            self.offset = offset
            _same(f"{made.e} of the driver", ev.encode(events[at + offset]), ev.encode(made))
        self.offset = 0
        if not self._made:
            raise _DifferenceFoundError("the driver had nothing to do", ev.encode(events[at])[:200], "no event")
        return len(self._made)

    def _ask(self, events: list[ev.Event], at: int) -> None:
        event, control = events[at], self._control
        match event:
            case ev.PolicyCall(slot="scheduler"):
                control.take(event.t)
            case ev.PolicyCall(slot="router"):
                self._route(events, at)
            case ev.PolicyCall(slot="dispatch", method="next"):
                control.dispatch(event.t)
            case ev.PolicyCall(slot="dispatch", args={"trajectory": str(trajectory), "turn": int(turn)}):
                position, _, member = trajectory.partition(".")
                control.refuse(event.t, position=int(position), member=int(member), turn=turn)
            case ev.StepStarted():
                control.start_step(event.t, ending=event.partial)
            case ev.Committed():
                control.commit(
                    event.t,
                    train_s=event.train_s,
                    data_s=event.data_s,
                    io_s=event.io_s,
                    tokens=event.tokens,
                    metrics=event.metrics,
                )
            case ev.Submitted():
                control.submit(event.t, domain=event.domain, difficulty=event.difficulty, members=event.members)
            case ev.Resumed():
                self._control = self._fresh()
                self._control.resume(event)
            case ev.Taken() | ev.PolicyCall() | ev.Routed() | ev.Refused():
                raise _DifferenceFoundError("no question of the driver leads here", ev.encode(event)[:200], "no event")
            case _:
                control.account(event)

    def _route(self, events: list[ev.Event], at: int) -> None:
        call, routed = events[at], events[at + 1] if at + 1 < len(events) else None
        if not (isinstance(call, ev.PolicyCall) and isinstance(routed, ev.Routed)):
            raise _DifferenceFoundError(
                "a routing decision without its request", ev.encode(call)[:200], "a routed event after it"
            )
        self._control.route(
            call.t,
            request=routed.request,
            position=routed.position,
            member=routed.member,
            turn=routed.turn,
            prompt_tokens=routed.prompt_tokens,
            path=call.args.get("path", ()),
        )


def _is_cut(events: list[ev.Event], at: int) -> bool:
    """A life that was killed ends anywhere, between a decision and what follows from it too."""
    return at >= len(events) or isinstance(events[at], ev.RolledBack)


def _same(what: str, traced: Any, replayed: Any) -> None:
    if traced != replayed:
        raise _DifferenceFoundError(what, traced, replayed)
