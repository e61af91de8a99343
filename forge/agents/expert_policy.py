"""A policy without a model that solves the pure domains' tasks in any scaffold: the perfect expert's calls, written in
the format asked for. It makes `forge.rollout.fake_engine` the deterministic engine that speaks every scaffold.

It reads the prompt alone for how far the task has come: the calls that can still be seen there, and notes on others.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any

from forge.agents.dialects import Native, Result, dialect_of
from forge.agents.episode import ANSWER, offered_tools, opening_of
from forge.agents.experts import PERFECT, script_of
from forge.agents.loops import DELEGATE
from forge.domains.base import Task
from forge.domains.registry import PURE
from forge.domains.tools import run_tool
from forge.formats import ToolCall
from forge.formats import get as get_format
from forge.gateway.fake_chat import END, VOCAB_SIZE, FakeChatCodec, Turn, turns
from forge.gateway.local import EngineBackend
from forge.gateway.tool_format import HERMES, parse
from forge.rollout.engine import Delta, Sampling
from forge.rollout.fake_engine import FakeEngine
from forge.scaffolds import LOOPS, STYLES, Scaffold
from forge.types import Json

_CODEC = FakeChatCodec()
#: bytes
MAX_CONTEXT = 100_000
#: one task in so many is begun with a call of a tool that there is not, and one with a call that cannot be read
SLIP = 16


@dataclass(frozen=True, slots=True)
class Script:
    """What is to be done in one conversation: calls with what they will return, then the answer. `opening`: the ids
    that its prompts begin with."""

    steps: tuple[Result, ...]
    answer: str
    opening: tuple[int, ...]


class ExpertPolicy:
    """Replies for one (scaffold, task)."""

    def __init__(self, scaffold: Scaffold, task: Task) -> None:
        self._scaffold, self._task = scaffold, task
        self._style = STYLES[scaffold.style]
        self._format = get_format(scaffold.format) if scaffold.format else HERMES
        domain = PURE[task.domain]()
        self._tools = offered_tools(scaffold, domain.tools(task))
        steps, answer = _solved(task)
        if scaffold.context == "own" and len(steps) > 1:
            known = "\n".join(step.fact for step in steps[:2])
            steps.insert(2, Result(_call("context_summarise", text=known), "", "done"))
        self._scripts = [self._script(steps, answer, self._tools, LOOPS[scaffold.loop].told)]
        if scaffold.loop == "delegate":
            whole = [Result(_call("delegate", task=task.prompt), "", answer)]
            main = self._script(whole, answer, offered_tools(scaffold, [DELEGATE]), LOOPS["delegate"].told)
            self._scripts = [main, self._script(steps, answer, self._tools, "")]
        self._dice = zlib.crc32(f"{scaffold.id} {task.id}".encode())

    def _script(self, steps: Sequence[Result], answer: str, tools: Sequence[Any], told: str) -> Script:
        dialect = dialect_of(self._scaffold, tells=self._style.tells)
        messages = opening_of(self._scaffold, dialect, self._task, tools, told)
        sent = [dict(tool) for tool in tools] if isinstance(dialect, Native) else []
        return Script(tuple(steps), answer, _CODEC.prompt(messages, sent)[:-1])

    def reply(self, prompt_ids: tuple[int, ...]) -> str:
        """The whole text of the next turn."""
        script = next(one for one in self._scripts if prompt_ids[: len(one.opening)] == one.opening)
        shown = turns(prompt_ids[len(script.opening) :])[:-1]
        words = self._style.words
        done = self._done(script, shown)
        asked = shown[-1].text if shown and shown[-1].role == "user" else ""
        if asked == words.summarise:
            return "\n".join(step.fact for step in script.steps[:done]) or "Nothing is known yet."
        if asked == words.plan and self._scaffold.loop == "plan":
            return "Look up what is needed, compute, answer."
        if not shown and script.steps and self._dice % SLIP in (0, 1):
            return self._slip(script.steps[0].call)
        if done == len(script.steps):
            return f"Thought: this is all.\n{ANSWER} {script.answer}" if self._is_react else script.answer
        return self._called([step.call for step in script.steps[done : self._batch(script, done)]])

    @property
    def _is_react(self) -> bool:
        return self._scaffold.loop == "react"

    def _batch(self, script: Script, done: int) -> int:
        """Where this turn's calls end: lookups of a shop's items may go side by side."""
        end = done + 1
        if self._task.domain == "shop" and self._scaffold.loop != "single" and self._dice % 2:
            while end < len(script.steps) and script.steps[end].call.name == script.steps[done].call.name == "lookup":
                end += 1
        return end

    def _called(self, calls: Sequence[ToolCall]) -> str:
        return self._format.render("Thought: a tool knows." if self._is_react else "", calls)

    def _slip(self, call: ToolCall) -> str:
        """A call that is cut short, where the scaffold would notice; else one of a tool that there is not."""
        broken = self._called([call]).replace(call.arguments, call.arguments[:-1])
        stream = self._format.stream()
        pieces = [*stream.feed(broken), *stream.close()]
        noticed = bool(self._scaffold.format and stream.reasons and all(isinstance(piece, str) for piece in pieces))
        if noticed and self._dice % SLIP:
            return broken
        return self._called([ToolCall("no_such_tool", call.arguments)])

    def _done(self, script: Script, shown: Sequence[Turn]) -> int:
        """How many steps were made, as far as the prompt shows: one more than the last that is seen or noted."""
        seen = [(call.name, _plain(call.arguments)) for turn in shown for call in self._calls(turn)]
        noted = {line for turn in shown if turn.role != "assistant" for line in turn.text.splitlines()}
        made = [
            nth
            for nth, step in enumerate(script.steps, 1)
            if (step.call.name, _plain(step.call.arguments)) in seen or step.fact in noted
        ]
        return max(made, default=0)

    def _calls(self, turn: Turn) -> list[ToolCall]:
        if turn.role != "assistant":
            return []
        if self._scaffold.format:
            stream = self._format.stream([dict(tool) for tool in self._tools])
            pieces = [*stream.feed(turn.text), *stream.close()]
            return [piece for piece in pieces if isinstance(piece, ToolCall)]
        return parse(turn.text)[1] or _echoed(turn.text)


class ExpertBackend(EngineBackend):
    """A deterministic engine that says what the policy of the trajectory, by its name, replies to the prompt."""

    def __init__(self, policies: Mapping[str, ExpertPolicy], **options: Any) -> None:
        self._policies = policies
        #: by the identity of a prompt, which the request under way keeps alive
        self._replies: dict[int, tuple[int, ...]] = {}
        engine = FakeEngine(self._token, slots=64, max_context=MAX_CONTEXT, vocab_size=VOCAB_SIZE)
        super().__init__(engine, **options)

    async def generate(
        self, trajectory: str, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        self._replies[id(prompt_ids)] = (*_CODEC.encode(self._policies[trajectory].reply(prompt_ids)), END)
        try:
            async with aclosing(super().generate(trajectory, prompt_ids, sampling)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            del self._replies[id(prompt_ids)]

    def _token(self, prompt_ids: tuple[int, ...], index: int, draw: float) -> int:  # noqa: ARG002 - a Script
        said = self._replies.get(id(prompt_ids))
        return END if said is None else said[index]  # None: its client has just hung up


def _solved(task: Task) -> tuple[list[Result], str]:
    """The perfect expert's calls with their results, and its answer."""
    domain, steps = PURE[task.domain](), []
    script = script_of(task, Random(0), PERFECT)
    try:
        call = next(script)
        while True:
            result, _ = run_tool(domain, task, call.name, call.arguments)
            steps.append(Result(_call(call.name, **call.arguments), "", result))
            call = script.send(result)
    except StopIteration as stop:
        return steps, str(stop.value)


def _call(name: str, **arguments: str) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, separators=(",", ":")))


def _echoed(text: str) -> list[ToolCall]:
    """Calls of a native turn that was rendered anew: a list of them at its end."""
    at = text.find('[{"id": ')
    if at < 0:
        return []
    calls: list[Json] = json.loads(text[at:])
    return [ToolCall(one["function"]["name"], one["function"]["arguments"]) for one in calls]


def _plain(arguments: str) -> str:
    """Arguments in one form."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
