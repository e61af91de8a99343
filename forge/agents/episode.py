"""An agent's episode: the runtime that loops (forge.agents.loops) are written in, on the stock `openai` client.

Its contexts are explicit state (forge.agents.context), changed by operations alone, so that every request can be
rebuilt from their log.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import openai

from forge.agents.context import DROPPED, Operation
from forge.agents.dialects import Dialect, Fault, Reply, Result, dialect_of, error
from forge.agents.operations import Append, Fold, Summarise
from forge.agents.record import Conversation
from forge.agents.strategies import OWN_NAMES, OWN_TOOLS, RULES, own_operation
from forge.domains.base import Domain, Environment, Task, ToolError, opening
from forge.domains.tools import failed, try_call
from forge.formats import ToolCall
from forge.scaffolds import LOOPS, STYLES, Scaffold
from forge.sections import ToolWait
from forge.types import Json

#: of the loop `react`
ANSWER = "Answer:"
Run = Callable[[Mapping[str, Any]], Awaitable[str]]


class ToolClock:
    """Seconds each tool call of one trajectory waits: the declared log-normal with a capped tail, seeded."""

    def __init__(self, wait: ToolWait, key: str) -> None:
        self._wait = wait
        self._random = random.Random(key)  # a string seeds by its hash digest, the same in every process
        self.total_s = 0.0

    async def sleep(self) -> None:
        if self._wait.median_s == 0:
            return
        seconds = self._wait.median_s * math.exp(self._wait.sigma * self._random.gauss(0.0, 1.0))
        seconds = min(seconds, self._wait.cap_s)
        self.total_s += seconds
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class Counts:
    """`faults`: what was wrong with replies and calls, by kind."""

    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    faults: Counter[str] = field(default_factory=Counter)


class Talk(Conversation):
    """A conversation with its tools. `own` runs those that are the scaffold's and not the environment's; `pending` are
    operations that the policy asked for in the turn under way."""

    def __init__(self, number: int, opening: Sequence[Json], tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(number, opening)
        self.tools = tools
        self.own: dict[str, Run] = {}
        self.pending: list[Operation] = []


def offered_tools(scaffold: Scaffold, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """With those that let the policy manage its context, where the scaffold leaves that to it."""
    return [*tools, *OWN_TOOLS] if scaffold.context == "own" else list(tools)


def opening_of(
    scaffold: Scaffold, dialect: Dialect, task: Task, tools: Sequence[Mapping[str, Any]], told: str
) -> list[Json]:
    """The messages that a conversation about `task` begins with; `told`: what the loop says of itself."""
    style = STYLES[scaffold.style]
    system = "\n\n".join(part for part in (task.system, style.system, told, dialect.describe(tools)) if part)
    return opening(replace(task, system=system, prompt=f"{style.before}{task.prompt}{style.after}"))


@dataclass
class Episode:
    """One task under way in a scaffold: what loops (forge.agents.loops) are written in."""

    client: openai.AsyncOpenAI
    model: str
    domain: Domain
    task: Task
    environment: Environment
    clock: ToolClock
    counts: Counts
    scaffold: Scaffold
    max_tokens: int
    talks: list[Talk] = field(default_factory=list)
    #: of every completion, the conversation and how many of its operations came before
    served: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.style = STYLES[self.scaffold.style]
        self.dialect = dialect_of(self.scaffold, tells=self.style.tells)
        self._is_single = self.scaffold.loop == "single"

    def begin(
        self, tools: Sequence[Mapping[str, Any]] | None = None, *, prompt: str | None = None, told: str | None = None
    ) -> Talk:
        """A new conversation; as all are about this task, with its domain's tools, unless said otherwise."""
        task = self.task if prompt is None else replace(self.task, prompt=prompt)
        said = LOOPS[self.scaffold.loop].told if told is None else told
        offered = offered_tools(self.scaffold, self.domain.tools(self.task) if tools is None else tools)
        talk = Talk(len(self.talks), opening_of(self.scaffold, self.dialect, task, offered, said), offered)
        if self.scaffold.context == "own":
            talk.own = {name: _asking(talk, name) for name in OWN_NAMES}
        self.talks.append(talk)
        return talk

    def say(self, talk: Talk, text: str) -> None:
        """The scaffold's own word, as a user's message."""
        talk.do(Append(message={"role": "user", "content": text}, origin="scaffold"))

    def hear(self, talk: Talk, reply: Reply) -> None:
        talk.do(Append(message=reply.message, origin="policy"))

    async def ask(self, talk: Talk) -> Reply:
        """A reply to the context, once the strategy has had its way with it. The reply is not yet part of it."""
        strategy = self.scaffold.strategy
        if strategy.kind in RULES:
            talk.do(RULES[strategy.kind](strategy.size))
        return await self._complete(talk)

    async def _summarise(self, talk: Talk) -> None:
        """Between turns, where the strategy says so and the context is long: what the policy writes replaces it."""
        strategy = self.scaffold.strategy
        if strategy.kind == "summarise" and len(talk.context.turns) > strategy.size:
            self.say(talk, self.style.words.summarise)
            written = await self._complete(talk)
            talk.do(Summarise(keep=0, text=written.text))

    async def _complete(self, talk: Talk) -> Reply:
        options = self.dialect.options(talk.tools, parallel=not self._is_single)
        served = (talk.number, len(talk.log))
        reply = await ask(
            self.client, model=self.model, messages=talk.context.messages, max_tokens=self.max_tokens, **options
        )
        self.counts.turns += 1
        self.served.append(served)
        return self.dialect.read(reply.choices[0].message, talk.tools)

    async def act(self, talk: Talk, *, retries: int = 0) -> Reply | None:
        """Calls until a reply that answers, which stays out of the context; None when the turns run out."""
        for _ in range(self.domain.max_turns):
            reply = self._judged(await self.ask(talk))
            if not reply.calls and not reply.faults:
                return reply
            faults = await self.use(talk, reply)
            if faults and retries:
                retries -= 1
                said = "\n".join(map(error, faults))
                talk.do(Fold(turns=1, text=f"{said}\n{self.style.words.retry}"))
            await self._summarise(talk)
        return None

    def _judged(self, reply: Reply) -> Reply:
        """Of the loop `react`, whose answers have a mark, and whose other replies without calls are faults."""
        if self.scaffold.loop != "react" or reply.calls or reply.faults:
            return reply
        _, mark, answer = reply.text.rpartition(ANSWER)
        if mark:
            return replace(reply, text=answer.strip())
        return replace(reply, faults=(Fault("no_answer", f"neither a call nor a line that begins with {ANSWER}"),))

    async def use(self, talk: Talk, reply: Reply) -> list[Fault]:
        """Take the reply into the context, run its calls, bring what came of them. Returns what was wrong."""
        self.hear(talk, reply)
        ids = reply.ids or ("",) * len(reply.calls)
        results = [await self._result(talk, call, ids[n], n) for n, call in enumerate(reply.calls)]
        for told in self.dialect.bring(results, reply.faults):
            talk.do(Append(message=told.message, origin=told.origin, fact=told.fact))
        for operation in talk.pending:
            talk.do(operation)
        talk.pending.clear()
        faults = [*reply.faults, *(one.fault for one in results if one.fault)]
        self.counts.faults.update(fault.kind for fault in faults)
        return faults

    async def _result(self, talk: Talk, call: ToolCall, call_id: str, nth: int) -> Result:
        self.counts.tool_calls += 1
        if nth and self._is_single:
            text, kind = failed(ToolError("one call a turn")), "several"
        elif call.name in talk.own:
            text, kind = await try_call(lambda name, given: talk.own[name](given), call.name, call.arguments)
        else:
            await self.clock.sleep()
            text, kind = await try_call(self.environment.call, call.name, call.arguments)
        self.counts.tool_errors += bool(kind)
        fault = Fault(kind, text.removeprefix("error: ")) if kind else None
        return Result(call, call_id, self._cut(text), fault)

    def _cut(self, text: str) -> str:
        strategy = self.scaffold.strategy
        if strategy.kind != "cut" or len(text) <= strategy.size + len(DROPPED):
            return text
        return text[: strategy.size] + DROPPED


def _asking(talk: Talk, name: str) -> Run:
    """A call asks for an operation on the context."""

    async def ask_for(arguments: Mapping[str, Any]) -> str:
        talk.pending.append(own_operation(talk, name, arguments))
        return "done"

    return ask_for


async def ask(client: openai.AsyncOpenAI, **request: Any) -> Any:
    """One reply. Who is refused (429) more often than the client bears asks on, until the item's time-out."""
    while True:
        try:
            return await client.chat.completions.create(**request)
        except openai.RateLimitError as refused:
            await asyncio.sleep(float(refused.response.headers.get("retry-after", 1.0)))
