"""The `Domain` protocol: where tasks come from, which tools they offer, and who says whether they were solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from forge.sandbox.base import Sandbox
from forge.types import Json

Split = Literal["train", "validation", "held_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. JSON-serialisable, so that it crosses processes and lies in the pool.

    `id` names the problem within its domain and split. `difficulty` is declared by the domain (hops, items, digits),
    known before the rollout. `data` is for the domain's own tools and verifier; the agent sees `system` and `prompt`.
    """

    id: str
    domain: str
    system: str
    prompt: str
    difficulty: float
    data: Mapping[str, Any]


class ToolError(Exception):
    """The model's call was malformed or failed; the message goes back to the model as the tool's result.

    `kind` is what it is counted as: arguments, unknown_tool, or failed.
    """

    def __init__(self, message: str, *, kind: str = "failed") -> None:
        super().__init__(message)
        self.kind = kind


class Environment(Protocol):
    """One task under way: what a tool changes stays changed for the next call, until it is closed."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Really run a tool. Raises ToolError for anything the model did wrong; anything else is the environment's own
        failure, which ends the trajectory."""
        ...

    async def score(self, answer: str) -> float:
        """Outcome reward in [0, 1] of the final answer and of what was done; any string is allowed."""
        ...

    async def close(self) -> None:
        """Also after a cancelled call."""
        ...


@runtime_checkable
class Workplace(Environment, Protocol):
    """An environment whose state are the files of a sandbox: a program can do the task in it, without its tools."""

    sandbox: Sandbox


class Domain(Protocol):
    """A family of tasks. Pure given (split, seed, index): the same arguments give the same task, in any process.

    The splits never share a problem (membership is decided by a hash of the problem itself).
    """

    name: str
    #: most completions a trajectory may have
    max_turns: int
    #: most tokens a completion may have
    max_tokens: int

    def task(self, split: Split, seed: int, index: int) -> Task: ...

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        """OpenAI tool schemas, [] for none."""
        ...

    async def begin(self, task: Task) -> Environment:
        """An environment of its own for one trajectory. Raises ForgeError where there can be none."""
        ...

    def warm_up(self) -> None:
        """Pay now for what a first task costs; raises ForgeError where something is missing that tasks need."""
        ...


class PureDomain(Domain, Protocol):
    """A domain whose tools answer at once and change nothing. Its classes inherit from it."""

    def call(self, task: Task, name: str, arguments: Mapping[str, Any]) -> str:
        """Really run a tool. Raises ToolError for anything the model did wrong, never anything else."""
        ...

    def score(self, task: Task, answer: str) -> float:
        """Outcome reward in [0, 1] of the final answer; any string is allowed."""
        ...

    async def begin(self, task: Task) -> Environment:
        return _Unchanging(self, task)

    def warm_up(self) -> None:
        self.score(self.task("train", 0, 0), "")


class _Unchanging:
    """The environment of a task of a pure domain."""

    def __init__(self, domain: PureDomain, task: Task) -> None:
        self._domain = domain
        self._task = task

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._domain.call(self._task, name, arguments)

    async def score(self, answer: str) -> float:
        return self._domain.score(self._task, answer)

    async def close(self) -> None:
        pass


def opening(task: Task) -> list[Json]:
    """The messages a task begins with. An empty system prompt is no message: every token costs time."""
    system = [{"role": "system", "content": task.system}] if task.system else []
    return [*system, {"role": "user", "content": task.prompt}]
