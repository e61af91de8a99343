"""The agent side: items and their members, from submission to their end. Pure producers of trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forge import trace as ev
from forge.control import Control, commonest
from forge.scenario import Scenario
from forge.types import DeathReason
from sim.alarm import Alarm, Later
from sim.clock import FS, to_fs, to_s
from sim.core import Core
from sim.rollout import Call, Rollout
from sim.sessions import Frontier
from sim.train_tokens import train_tokens
from sim.work import Group, MemberWork, Work


@dataclass(slots=True, eq=False)
class Member:
    """One trajectory under way, and what it has done so far."""

    item: Item
    number: int
    work: MemberWork
    frontier: Frontier
    calls: dict[int, Call] = field(default_factory=dict)
    turns: int = 0
    tokens: int = 0
    tool_wait_s: float = 0.0
    done: bool = False
    death: DeathReason | None = None


@dataclass(slots=True, eq=False)
class Item:
    position: int
    members: list[Member] = field(default_factory=list)
    survivors: list[MemberWork] = field(default_factory=list)
    ended: bool = False


class Agents:
    """`on_change` is called when an item has ended, finished or dead, and when one at the head may be parked."""

    def __init__(
        self,
        env: Any,
        control: Control,
        rollout: Rollout,
        scenario: Scenario,
        work: Work,
        on_change: Callable[[], None],
    ) -> None:
        self._env = env
        self._later = Later(env, 4 * FS)
        self._control = control
        self._rollout = rollout
        self._work = work
        sim = scenario.sim
        works = sim.request_cpu_s + sim.request_latency_s > 0
        self._core = Core(env, sim.request_cpu_s, sim.request_latency_s) if works else None
        self._timeout = to_fs(scenario.queue.item_timeout_s)
        self._merged = scenario.train.merge == "tree"
        self._on_change = on_change
        self._parks = scenario.shape().park_items > 0
        self._running: dict[int, Item] = {}  # by position, where items may be parked
        self.train_tokens: dict[int, int] = {}  # of finished items, until the trainer takes them

    def submit(self, domain: str) -> None:
        """Start the next item and its members."""
        work: Group = self._work.item(len(self._control.queue), domain)
        position = self._control.submit(
            self._now(), domain=work.domain, difficulty=work.difficulty, members=len(work.members)
        )
        item = Item(position)
        for number, one in enumerate(work.members):
            item.members.append(Member(item, number, one, Frontier(one.steps)))
        for member in item.members:
            for number in member.frontier.first():
                self._wait(member, number, member.work.steps[number].delay_s)
        self._later.add(self._env.now + self._timeout, self._timed_out, item)
        if self._parks:
            self._running[position] = item
            self._when_parked(item)

    def _when_parked(self, item: Item) -> None:
        """Rings at the first instant at which the scheduler would be asked to park it."""
        due = self._control.park_due(item.position)
        if due is not None:
            self._later.add(to_fs(math.nextafter(due, math.inf)), self._may_park, item)

    def _may_park(self, alarm: Alarm) -> None:
        item: Item = alarm.about
        if not item.ended and self._control.queue.head == item.position:
            self._on_change()

    def _now(self) -> float:
        return to_s(self._env.now)

    # --- one member ------

    def _wait(self, member: Member, number: int, delay_s: float) -> None:
        """The tool's time, or the agent's own, then the next request."""
        if delay_s:
            self._later.add(self._env.now + to_fs(delay_s), self._waited, (member, number))
        else:
            self._ask(member, number, 0.0)

    def _waited(self, alarm: Alarm) -> None:
        asks: tuple[Member, int] = alarm.about
        member, number = asks
        self._ask(member, number, member.work.steps[number].delay_s)

    def _ask(self, member: Member, number: int, waited_s: float, attempt: int = 0) -> None:
        if member.item.ended:
            return
        member.tool_wait_s += waited_s
        if self._core is None:
            self._send(member, number, attempt)
        else:
            self._core.before(lambda: self._send(member, number, attempt))

    def _send(self, member: Member, number: int, attempt: int) -> None:
        """One completion; sent again for as long as its instance crashes under it."""
        position = member.item.position
        if member.item.ended:
            return
        if not self._rollout.lives:
            self._rollout.when_live(lambda: self._send(member, number, attempt))
            return
        retry_s = self._control.refuse(self._now(), position=position, member=member.number, turn=number)
        if retry_s is not None:
            self._later.add(self._env.now + to_fs(retry_s), self._asks_again, (member, number, attempt))
            return
        retry = f".r{attempt}" if attempt else ""
        name = f"{position}.{member.number}.{number}{retry}"
        step, asks = member.work.steps[number], (member, number, attempt)
        call = self._rollout.send(name, position, member.number, number, step, self._left, asks)
        member.calls[number] = call

    def _asks_again(self, alarm: Alarm) -> None:
        refused: tuple[Member, int, int] = alarm.about
        self._send(*refused)

    def _left(self, call: Call) -> None:
        """It ended at its instance, answered or lost."""
        asks: tuple[Member, int, int] = call.about
        member, number, attempt = asks
        del member.calls[number]
        if member.item.ended:
            return
        if call.lost:
            self._ask(member, number, 0.0, attempt + 1)
        elif self._core is None:
            self._answered(member, number)
        else:
            self._core.after(lambda: self._answered(member, number))

    def _answered(self, member: Member, number: int) -> None:
        if member.item.ended:
            return
        steps = member.work.steps
        member.turns += 1
        member.tokens += steps[number].output
        free = member.frontier.answered(number)
        if not member.frontier.left:
            if member.work.idle_s:
                self._later.add(self._env.now + to_fs(member.work.idle_s), self._idled, member)
            else:
                self._member_done(member)
            return
        for later in free:
            self._wait(member, later, steps[later].delay_s)

    def _idled(self, alarm: Alarm) -> None:
        self._member_done(alarm.about)

    def _member_done(self, member: Member) -> None:
        item = member.item
        if item.ended:
            return
        self._account_member(member, member.work.death)
        if member.work.death is None:
            item.survivors.append(member.work)
        if all(m.done for m in item.members):
            self._end(item)

    def _timed_out(self, alarm: Alarm) -> None:
        """Members still under way die of it. All began together, so the item ends here, with who has survived."""
        item: Item = alarm.about
        if item.ended:
            return
        self._stop_members(item, DeathReason.TIMEOUT)
        self._end(item)

    def _stop_members(self, item: Item, reason: DeathReason) -> None:
        item.ended = True
        for member in item.members:
            if not member.done:
                self._account_member(member, reason)
                for call in list(member.calls.values()):
                    self._rollout.cancel(call)

    def kill_stale(self, position: int) -> None:
        """A parked item that the head left behind: its members are stopped; a finished one is dropped."""
        item = self._running.pop(position, None)
        if item is None:
            del self.train_tokens[position]
            tokens = self._control.views.items[position].tokens
        else:
            self._stop_members(item, DeathReason.STALE)
            tokens = sum(m.tokens for m in item.members)
            self._forget(item)
        self._control.die(self._now(), position, DeathReason.STALE, tokens=tokens)

    def _forget(self, item: Item) -> None:
        item.members.clear()  # its timer holds the item for as long as it would have run
        item.survivors.clear()

    def _end(self, item: Item) -> None:
        item.ended = True
        self.train_tokens[item.position] = train_tokens(item.survivors, self._work.block, merged=self._merged)
        self._control.finish(
            self._now(),
            item.position,
            tokens=sum(m.tokens for m in item.members),
            rewards=[one.reward for one in item.survivors],
            reason=commonest([m.death for m in item.members if m.death is not None]),
        )
        self._running.pop(item.position, None)
        self._forget(item)
        self._on_change()

    def _account_member(self, member: Member, reason: DeathReason | None) -> None:
        member.done, member.death = True, reason
        self._rollout.over(member.item.position, member.number)
        self._control.account(
            ev.MemberDone(
                t=self._now(),
                position=member.item.position,
                member=member.number,
                reward=member.work.reward if reason is None else None,
                turns=member.turns,
                tokens=member.tokens,
                tool_wait_s=member.tool_wait_s,
                reason=None if reason is None else reason.value,
            )
        )
