"""`coding`: small tasks in a sandbox, with command and file tools, and judged by tests that the agent never sees.

The judge runs in a fresh sandbox and on the one file that the task names. Only inputs go in: what the right answer is
stays outside, and results are compared outside, as JSON. So a solution that ends its process, claims success, or makes
objects equal to everything gains nothing: it has to compute the answers.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from forge.domains.base import Environment, Split, Task
from forge.domains.coding_tasks import draft
from forge.domains.splits import draw_task
from forge.sandbox.base import Limits, Sandbox, WorkspaceError
from forge.sandbox.bubblewrap import Bubblewrap
from forge.sandbox.child import PATH
from forge.sandbox.holder import need_programs
from forge.sandbox.tools import TOOLS, use
from forge.types import ForgeError

SYSTEM = "You work in a folder of your own, with tools for commands and files. When the task is done, say so."
LIMITS = Limits(seconds=10.0, cpu_seconds=10, memory_mib=256, processes=32, output_kib=16)
DISK_MIB = 16

# Whatever the solution prints goes to its standard error, which is nowhere.
_JUDGE = """\
import configparser, importlib.util, json, os, sys
asked, out = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
def run(function, value):
    try:
        return {"value": function(value)}
    except Exception as error:
        return {"error": type(error).__name__}
if "function" in asked:
    spec = importlib.util.spec_from_file_location("solution", asked["path"])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = [run(getattr(module, asked["function"]), value) for value in asked["inputs"]]
elif asked["format"] == "json":
    found = json.load(open(asked["path"]))
else:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(open(asked["path"]).read())
    found = {section: dict(parser[section]) for section in parser.sections()}
out.write(json.dumps(found))
out.flush()
"""

Open = Callable[[], Awaitable[Sandbox]]


async def bubblewrap() -> Sandbox:
    return await Bubblewrap.open(disk_mib=DISK_MIB)


class Coding:
    """`difficulty`: 1 or 2 for settings to change besides the first, 2 to repair a function, 3 to write one."""

    name = "coding"
    max_turns = 12
    max_tokens = 512

    def __init__(self, open_sandbox: Open = bubblewrap) -> None:
        self._open = open_sandbox

    def task(self, split: Split, seed: int, index: int) -> Task:
        return draw_task(self.name, split, seed, index, draft, system=SYSTEM)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        return TOOLS

    async def begin(self, task: Task) -> Environment:
        sandbox = await self._open()
        for path, text in task.data["files"].items():
            sandbox.write(path, text.encode())
        return _Work(task, sandbox, self._open)

    def warm_up(self) -> None:
        need_programs()
        if shutil.which("python3", path=PATH) is None:
            raise ForgeError(f"domain {self.name}: no python3 in {PATH}; apt-get install python3")


class _Work:
    """The environment: its workspace, and the verdict on what is in it."""

    def __init__(self, task: Task, sandbox: Sandbox, open_sandbox: Open) -> None:
        self._task = task
        self.sandbox = sandbox
        self._open = open_sandbox

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        return await use(self.sandbox, name, arguments, LIMITS)

    async def score(self, answer: str) -> float:  # noqa: ARG002 - what was done counts, not what is said
        try:
            solution = self.sandbox.read(self._task.data["path"])
        except WorkspaceError:
            return 0.0
        fresh = await self._open()
        try:
            return await verdict(self._task, solution, fresh)
        finally:
            await fresh.close()

    async def close(self) -> None:
        await self.sandbox.close()


async def verdict(task: Task, solution: bytes, fresh: Sandbox) -> float:
    """1 where the file with these bytes does all that is asked, else 0."""
    path = task.data["path"]
    fresh.write(path, solution)
    asked = json.dumps({**task.data["judge"], "path": path})
    result = await fresh.run(f"exec python3 -I -c {shlex.quote(_JUDGE)} 2>/dev/null", asked.encode(), LIMITS)
    try:
        found = json.loads(result.output)
        return float(_canonical(found) == _canonical(task.data["expected"]))
    except (ValueError, RecursionError):
        return 0.0


def _canonical(value: Any) -> str:
    """Equal for equal JSON alone: in Python true is 1."""
    return json.dumps(value, sort_keys=True)
