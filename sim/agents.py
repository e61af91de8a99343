"""The agent side: items and their members, from submission to their end. Pure producers of trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from forge import trace as ev
from forge.control import Control, commonest
from forge.scenario import Scenario
from forge.types import DeathReason
from sim.clock import to_ns, to_s
from sim.fleet import Call, Fleet
from sim.workload import ItemWork, MemberWork, Turn, Workload


@dataclass(slots=True, eq=False)
class Member:
    """One trajectory under way, and what it has done so far."""

    number: int
    work: MemberWork
    call: Call | None = None
    turns: int = 0
    tokens: int = 0
    tool_wait_s: float = 0.0
    done: bool = False
    death: DeathReason | None = None


@dataclass(slots=True, eq=False)
class Item:
    position: int
    members: list[Member]
    rewards: list[float] = field(default_factory=list)
    train_tokens: int = 0  # tokens a trainer forwards: each survivor's last prompt and answer, which hold all before
    ended: bool = False


class Core:
    """One shared processor, first come first served: the gateway and agent processes of a live run are CPU bound."""

    def __init__(self, work_s: float, latency_s: float) -> None:
        self._work, self._latency = to_ns(work_s), to_ns(latency_s)
        self._free = 0

    def delay(self, now: int) -> int:
        """Nanoseconds until the work around one completion, asked for now, is done."""
        self._free = max(self._free, now) + self._work
        return self._free - now + self._latency


class Agents:
    """`on_end` is called when an item has ended, finished or dead."""

    def __init__(
        self,
        env: Any,
        control: Control,
        fleet: Fleet,
        scenario: Scenario,
        workload: Workload,
        on_end: Callable[[], None],
    ) -> None:
        self._env = env
        self._control = control
        self._fleet = fleet
        self._workload = workload
        self._core = Core(scenario.sim.request_cpu_s, scenario.sim.request_latency_s)
        self._timeout = to_ns(scenario.queue.item_timeout_s)
        self._on_end = on_end
        self.train_tokens: dict[int, int] = {}  # of finished items, until the trainer takes them

    def submit(self) -> None:
        """Start the next item and its members."""
        work: ItemWork = self._workload.item(len(self._control.queue))
        position = self._control.submit(
            self._now(), domain=work.domain, difficulty=work.difficulty, members=len(work.members)
        )
        item = Item(position, [Member(m, w) for m, w in enumerate(work.members)])
        for member in item.members:
            self._env.process(self._play(item, member))
        deadline = self._env.timeout(self._timeout)
        deadline.callbacks.append(lambda _: self._time_out(item))

    def _now(self) -> float:
        return to_s(self._env.now)

    # --- one member ------

    def _play(self, item: Item, member: Member) -> Any:
        """Process: turns, each a request and then a tool wait."""
        for number, turn in enumerate(member.work.turns):
            yield from self._ask(item, member, number, turn)
            if item.ended:
                return
            member.turns += 1
            member.tokens += turn.sampled_tokens
            if turn.tool_wait_s:
                yield self._env.timeout(to_ns(turn.tool_wait_s))
                member.tool_wait_s += turn.tool_wait_s
                if item.ended:
                    return
        self._member_done(item, member, DeathReason.AGENT_CRASH if member.work.dies else None)

    def _ask(self, item: Item, member: Member, number: int, turn: Turn) -> Any:
        """One completion; sent again for as long as its instance crashes under it."""
        attempt = 0
        while not item.ended:
            yield self._env.timeout(self._core.delay(self._env.now))
            while (back := self._fleet.wait_live()) is not None:
                yield back
            if item.ended:
                return
            retry = f".r{attempt}" if attempt else ""
            member.call = self._fleet.send(
                request=f"{item.position}.{member.number}.{number}{retry}",
                position=item.position,
                member=member.number,
                turn=number,
                prompt_tokens=turn.prompt_tokens,
                tokens=turn.sampled_tokens,
            )
            call: Call = yield member.call.answered
            member.call = None
            if not call.lost:
                return
            attempt += 1

    def _member_done(self, item: Item, member: Member, reason: DeathReason | None) -> None:
        self._account_member(item, member, reason)
        if reason is None:
            item.rewards.append(member.work.reward)
            last = member.work.turns[-1]
            item.train_tokens += last.prompt_tokens + last.sampled_tokens
        if all(m.done for m in item.members):
            self._end(item)

    def _time_out(self, item: Item) -> None:
        """Members still under way die of it. All began together, so the item ends here, with who has survived."""
        if item.ended:
            return
        item.ended = True
        for member in item.members:
            if not member.done:
                self._account_member(item, member, DeathReason.TIMEOUT)
                if member.call is not None:
                    self._fleet.cancel(member.call)
        self._end(item)

    def _end(self, item: Item) -> None:
        item.ended = True
        self.train_tokens[item.position] = item.train_tokens
        self._control.finish(
            self._now(),
            item.position,
            tokens=sum(m.tokens for m in item.members),
            rewards=item.rewards,
            reason=commonest([m.death for m in item.members if m.death is not None]),
        )
        self._on_end()

    def _account_member(self, item: Item, member: Member, reason: DeathReason | None) -> None:
        member.done, member.death = True, reason
        self._control.account(
            ev.MemberDone(
                t=self._now(),
                position=item.position,
                member=member.number,
                reward=member.work.reward if reason is None else None,
                turns=member.turns,
                tokens=member.tokens,
                tool_wait_s=member.tool_wait_s,
                reason=None if reason is None else reason.value,
            )
        )
