"""What every agent program of others is asked to do, and what has to come of it: blackbox.toml beside this file."""

from __future__ import annotations

import json
import tomllib
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError

from forge.blackbox.recipe import Recipe
from forge.domains.base import Task
from forge.faults import explain
from forge.gateway.fake_chat import Turn
from forge.gateway.tool_format import ToolCall, render
from forge.sections import Positive, Section
from forge.types import ForgeError

Variant = Literal["plain", "429", "500", "cut", "stall", "compaction", "sub_agent"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
#: what the scripted policy answers where it is asked for a summary, or about anything but its task
TO_DO = "The task itself remains to be done."
SUMMARY = f"<summary>\n<state_snapshot>step-1 is done: the folder was looked at. {TO_DO}</state_snapshot>\n</summary>"
SIDE, SUB_AGENT = "An errand", "The sub-agent has looked: all is as it should be."
#: in the prompt of a sub-agent
ERRAND = "Look whether all is as it should be, and say so."


class Step(Section):
    """A reply: a call, or text. `$command` is replaced by what does the task, `$step` by a mark to know it again by."""

    tool: str | None = None
    arguments: dict[str, Any] = Field(default_factory=dict)
    text: str = ""


class Change(Section):
    """What of a recipe is other in one variant. `replace`: in its command and the files of its home."""

    environment: dict[str, str] = Field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # more of the command, before the task
    replace: dict[str, str] = Field(default_factory=dict)
    max_context: Positive = 2_000_000
    steps: tuple[Step, ...] = ()  # before the one that does the task
    sign: str = ""  # in the last turn of a prompt that asks for a summary


class Case(Section):
    """One program, and the trees it may leave, as forge.bench.blackbox.shape tells them."""

    recipe: str
    step: Step  # does the task
    end: Step = Step(text="The task is done.")
    always: Change = Change()
    variants: dict[Variant, Change] = Field(default_factory=dict)
    tree: str = "root 2"  # in peace, and where it waits or asks again
    expect: dict[Variant, tuple[str, ...]] = Field(default_factory=dict)  # where it is another, or one of several
    gives_up: dict[Variant, str] = Field(default_factory=dict)  # where the program itself ends without its task: why
    left_out: dict[Variant, str] = Field(default_factory=dict)  # why

    def expected(self, variant: Variant) -> tuple[str, ...]:
        return self.expect.get(variant) or (() if variant in ("compaction", "sub_agent") else (self.tree,))


class _File(Section):
    cases: dict[str, Case]


def load_cases(names: Sequence[str] = ()) -> dict[str, Case]:
    """All, or those. Raises ForgeError."""
    path = resources.files("forge") / "bench" / "blackbox.toml"
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        cases = _File.model_validate({"cases": data}).cases
    except ValidationError as error:
        raise ForgeError("\n".join(line for _, line in explain(error, {"cases": data}))) from None
    for name in names:
        if name not in cases:
            raise ForgeError(f"{name}: no case by that name; there are {', '.join(cases)}")
    return {name: case for name, case in cases.items() if not names or name in names}


def changed(recipe: Recipe, *changes: Change) -> Recipe:
    for change in changes:

        def replaced(text: str, change: Change = change) -> str:
            for old, new in change.replace.items():
                text = text.replace(old, new)
            return text

        at = recipe.command.index("$task") if "$task" in recipe.command else len(recipe.command)
        command = (*recipe.command[:at], *change.arguments, *recipe.command[at:])
        recipe = recipe.model_copy(
            update={
                "command": tuple(map(replaced, command)),
                "environment": {**recipe.environment, **change.environment},
                "home": {path: replaced(text) for path, text in recipe.home.items()},
            }
        )
    return recipe


class Script:
    """The replies of one case to one task, each from its prompt alone."""

    def __init__(self, case: Case, change: Change, task: Task) -> None:
        self._steps = (*change.steps, case.step, case.end)
        self._sign = change.sign
        self._task = task
        self._command = _solution(task)

    def __call__(self, turns: Sequence[Turn]) -> str:
        turns = [turn for turn in turns if turn != ("assistant", "")]  # the one that is to come
        shown = [turn for turn in turns if turn.role != "system"]
        if self._sign and any(self._sign in turn.text for turn in turns if turn is turns[0] or turn in shown[-1:]):
            return SUMMARY
        if not any(self._task.data["path"] in turn.text or TO_DO in turn.text for turn in shown):
            return SUB_AGENT if any(ERRAND in turn.text for turn in shown) else SIDE
        done = [n for n in range(1, len(self._steps)) if any(_mark(n) in turn.text for turn in shown)]
        return self._reply(max(done, default=0))

    def _reply(self, number: int) -> str:
        step, mark = self._steps[number], _mark(number + 1)

        def filled(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: filled(one) for key, one in value.items()}
            if not isinstance(value, str):
                return value
            command = f"true {mark}; {self._command}"
            return Template(value).safe_substitute(
                command=command,
                step=mark,
                errand=ERRAND,
                path=self._task.data["path"],
                solution=self._task.data["solution"],
            )

        text = str(filled(step.text))
        return render(text, [ToolCall(step.tool, json.dumps(filled(step.arguments)))] if step.tool else [])


def _mark(number: int) -> str:
    return f"step-{number}"


def _solution(task: Task) -> str:
    """A command that does the task, without anything that needs quoting."""
    return f"echo {b64encode(task.data['solution'].encode()).decode()} | base64 -d > {task.data['path']}"
