"""Runs an agent program of others on one task, in a sandbox of its own, and says how it ended.

The program has a fresh home and workspace, and reaches one trajectory of the gateway. Whatever it does (hangs, floods,
forks, crashes, writes all over its disk) it is ended with all that it started, and what is left is an outcome.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from forge.agents.loop import ToolClock
from forge.blackbox.door import Door
from forge.blackbox.recipe import Filled, Recipe, fill, folders_of
from forge.domains.base import Domain, Environment, Task, Workplace
from forge.domains.tools import use_tool
from forge.sandbox.base import FLOOD, Guest, Result, Sandbox, WorkspaceError
from forge.sandbox.bubblewrap import Bubblewrap
from forge.types import DeathReason, ForgeError, Outcome

#: of a workspace where the task has none
DISK_MIB = 16
#: characters of a death's detail
_DETAIL = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """`url`: http://host:port; `key`: what to show as an API key."""

    url: str
    model: str
    key: str = "forge"

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80


@dataclass(slots=True)
class Played:
    """`result` None: the program never ran."""

    outcome: Outcome
    result: Result | None = None


@dataclass(slots=True)
class Launch:
    """One program on one task."""

    recipe: Recipe
    gateway: Gateway
    trajectory: str
    domain: Domain
    task: Task
    clock: ToolClock
    tool_calls: int = field(default=0, init=False)  # of the task's own tools
    tool_errors: int = field(default=0, init=False)

    async def play(self) -> Played:
        """Never raises but for cancellation, which ends the program first: a failure is a dead outcome."""
        try:
            environment = await self.domain.begin(self.task)
            try:
                return await self._played(environment)
            finally:
                await environment.close()
        except ForgeError as error:
            return Played(self._dead(DeathReason.ENVIRONMENT, str(error)))
        except Exception as error:
            return Played(self._dead(DeathReason.ENVIRONMENT, f"{type(error).__name__}: {error}"))

    async def _played(self, environment: Environment) -> Played:
        if isinstance(environment, Workplace):
            return await self._judged(environment.sandbox, environment)
        sandbox = await Bubblewrap.open(disk_mib=DISK_MIB)
        try:
            return await self._judged(sandbox, environment)
        finally:
            await sandbox.close()

    async def _judged(self, sandbox: Sandbox, environment: Environment) -> Played:
        filled = self._filled(environment)
        for path, text in filled.workspace.items():
            sandbox.write(path, text.encode())
        result = await sandbox.run(
            shlex.join(filled.command),
            limits=self.recipe.limits.limits(),
            guest=self._guest(filled, environment),
        )
        if death := died(self.recipe, result):
            return Played(self._dead(*death), result)
        if result.exit_code in self.recipe.exit.failed:
            reward = 0.0
        else:
            reward = await environment.score(self._answer(sandbox, result))
        return Played(self._ended(reward), result)

    def _filled(self, environment: Environment) -> Filled:
        has_files = isinstance(environment, Workplace)
        told = {
            "system": self.task.system,
            "prompt": self.task.prompt,
            "workspace": has_files,
            "tools": [] if has_files else [tool["function"] for tool in self.domain.tools(self.task)],
            "max_turns": self.domain.max_turns,
        }
        values = {
            "task": "\n\n".join(filter(None, (self.task.system, self.task.prompt))),
            "task_json": json.dumps(told),
            "trajectory": self.trajectory,
            "model": self.gateway.model,
            "key": self.gateway.key,
        }
        return fill(self.recipe, values)

    def _guest(self, filled: Filled, environment: Environment) -> Guest:
        async def tool(name: str, arguments: str) -> tuple[str, bool]:
            self.tool_calls += 1
            await self.clock.sleep()
            content, worked = await use_tool(environment, name, arguments)
            self.tool_errors += not worked
            return content, worked

        async def no_tool(name: str, arguments: str) -> tuple[str, bool]:  # noqa: ARG001
            return "this task has no tools but your own", False

        own = no_tool if isinstance(environment, Workplace) else tool
        return Guest(
            folders=folders_of(self.recipe),
            environment=filled.environment,
            home={path: text.encode() for path, text in filled.home.items()},
            home_mib=self.recipe.limits.home_mib,
            door=Door(self.gateway.address, self.trajectory, own),
        )

    def _answer(self, sandbox: Sandbox, result: Result) -> str:
        if self.recipe.answer is None:
            return result.output
        try:
            return sandbox.read(self.recipe.answer).decode(errors="replace")
        except WorkspaceError:
            return ""  # it gave none

    def _dead(self, reason: DeathReason, detail: str) -> Outcome:
        return self._outcome(None, reason, detail[:_DETAIL])

    def _ended(self, reward: float) -> Outcome:
        return self._outcome(reward, None, "")

    def _outcome(self, reward: float | None, reason: DeathReason | None, detail: str) -> Outcome:
        return Outcome(
            trajectory=self.trajectory,
            reward=reward,
            reason=reason,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            tool_wait_s=self.clock.total_s,
            detail=detail,
        )


def died(recipe: Recipe, result: Result) -> tuple[DeathReason, str] | None:
    """Why a program that ended so leaves a dead trajectory, in words; None: it has a reward."""
    if "time" in result.met:
        return DeathReason.TIMEOUT, f"over {recipe.limits.seconds:g} s"
    met = f" (limits met: {', '.join(result.met)})" if result.met else ""
    if result.exit_code is None:
        if "output" in result.met:
            most = FLOOD * recipe.limits.output_kib
            return DeathReason.AGENT_CRASH, f"ended: it wrote more than {most} KiB"
        return DeathReason.AGENT_CRASH, f"ended{met}"
    if result.exit_code in (*recipe.exit.scored, *recipe.exit.failed):
        return None
    last = (result.output.strip().splitlines() or ["it said nothing"])[-1]
    return DeathReason.AGENT_CRASH, f"exit code {result.exit_code}{met}: {last}"
