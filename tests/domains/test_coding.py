"""`coding`: many tasks, a judge that only the right solution passes, and whole episodes in the sandbox."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, get_args

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.agents.experts import PERFECT, script_of
from forge.agents.loop import ToolClock, run_episode
from forge.domains.base import Split, Task
from forge.domains.coding import Coding
from forge.domains.coding_tasks import PIECES
from forge.domains.splits import split_of
from forge.runs import RunFolder
from forge.sandbox.base import Result, Sandbox
from forge.sandbox.fake import FakeSandbox
from forge.sections import ToolWait
from forge.types import DeathReason, ForgeError, Outcome

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="not installed: bwrap (apt-get install bubblewrap)"
)
SPLITS: tuple[Split, ...] = get_args(Split)
DOMAIN = Coding()


@given(split=st.sampled_from(SPLITS), seed=st.integers(0, 2**31), index=st.integers(0, 2**31))
@settings(max_examples=40)
def test_a_task_is_a_pure_function_of_its_arguments(split: Split, seed: int, index: int) -> None:
    task = DOMAIN.task(split, seed, index)
    assert task == Coding().task(split, seed, index)
    assert split_of("coding", task.data["problem"]) == split
    assert json.loads(json.dumps(task.data)) == task.data
    assert task.data["solution"] != task.data["files"][task.data["path"]]


def test_thousands_of_tasks_are_distinct_and_of_every_kind() -> None:
    tasks = [DOMAIN.task("train", seed, index) for seed in (0, 1) for index in range(1000)]
    assert len({task.data["problem"] for task in tasks}) > 1990
    kinds = Counter(task.data["kind"] for task in tasks)
    assert min(kinds[kind] for kind in ("fix", "write", "config")) > 500
    verbs = {task.data["judge"]["function"].partition("_")[0] for task in tasks if task.data["kind"] != "config"}
    assert len(verbs) == len(PIECES)


def task_of(kind: str, seed: int = 0) -> Task:
    return next(t for index in range(1000) if (t := DOMAIN.task("train", seed, index)).data["kind"] == kind)


async def scored(task: Task, text: str | None, answer: str = "done") -> float:
    environment = await DOMAIN.begin(task)
    try:
        if text is not None:
            await environment.call("write_file", {"path": task.data["path"], "text": text})
        return await environment.score(answer)
    finally:
        await environment.close()


CHEATS = {
    "leaves at once": "import os; os._exit(0)",
    "claims success": "import os\nos.write(1, b'[{\"value\": 0}]')\nraise SystemExit(0)",
    "equals everything": "class Same:\n    __eq__ = lambda *_: True\nNAME = lambda value: Same()",
    "is a number that equals everything": "class Same(int):\n    __eq__ = lambda *_: True\nNAME = lambda value: Same()",
    "changes the judge": "import json\njson.dumps = lambda *_: 'true'\nNAME = lambda value: None",
    "looks for the answers": "import gc\nNAME = lambda value: [o for o in gc.get_objects() if 'expected' in o]",
    "never returns": "NAME = lambda value: NAME(value) if value else None\nwhile True: pass",
    "floods": "while True: print('x' * 10000, flush=True)",
    "nests": "import os\nos.write(1, b'[' * 16000)\nos._exit(0)",
    "is no Python": "def NAME(:",
    "is empty": "",
}


@needs_bubblewrap
@pytest.mark.parametrize("kind", ["fix", "write", "config"])
async def test_the_right_solution_passes_and_what_was_given_does_not(kind: str) -> None:
    for seed in range(3):
        task = task_of(kind, seed)
        assert await scored(task, task.data["solution"], answer="") == 1.0
        assert await scored(task, None) == 0.0


@needs_bubblewrap
@pytest.mark.parametrize("cheat", sorted(CHEATS))
async def test_a_cheat_gains_nothing(cheat: str) -> None:
    task = task_of("write")
    assert await scored(task, CHEATS[cheat].replace("NAME", task.data["judge"]["function"])) == 0.0


@needs_bubblewrap
async def test_the_shown_examples_by_heart_gain_nothing() -> None:
    task = task_of("write")
    environment = await DOMAIN.begin(task)
    text = await environment.call("read_file", {"path": task.data["path"]})
    shown = text.split(">>> ")[1:]
    name = task.data["judge"]["function"]
    table = [(one.split("\n")[0].removeprefix(f"{name}(")[:-1], one.split("\n")[1].strip()) for one in shown]
    lines = [f"    if value == {value}: return {answer}" for value, answer in table]
    await environment.call(
        "write_file", {"path": task.data["path"], "text": "\n".join([f"def {name}(value):", *lines])}
    )
    asked = f"python3 -c 'from {task.data['path'][:-3]} import *; print({shown[0].splitlines()[0]})'"
    assert await environment.call("bash", {"command": asked}) == table[0][1]
    assert await environment.score("done") == 0.0
    await environment.close()


@needs_bubblewrap
async def test_a_solution_that_is_removed_or_a_link_scores_nothing() -> None:
    task = task_of("config")
    environment = await DOMAIN.begin(task)
    await environment.call("bash", {"command": f"rm {task.data['path']}; ln -s /etc/passwd {task.data['path']}"})
    assert await environment.score("done") == 0.0
    await environment.close()


# --- whole episodes ------


class ScriptedModel:
    """A server of chat completions that plays the domain's expert: its place in the script is the history's."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def reply(self, request: httpx.Request) -> httpx.Response:
        script = script_of(self.task, Random(0), PERFECT)
        results = [one["content"] for one in json.loads(request.content)["messages"] if one["role"] == "tool"]
        message: dict[str, Any] = {"role": "assistant", "content": None}
        try:
            call = next(script)
            for result in results:
                call = script.send(result)
            function = {"name": call.name, "arguments": json.dumps(dict(call.arguments))}
            message["tool_calls"] = [{"id": f"c{len(results)}", "type": "function", "function": function}]
        except StopIteration as stop:
            message["content"] = stop.value
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)


async def played(domain: Coding, task: Task) -> Outcome:
    transport = httpx.MockTransport(ScriptedModel(task).reply)
    async with openai.AsyncOpenAI(
        base_url="http://model/v1", api_key="x", http_client=httpx.AsyncClient(transport=transport)
    ) as client:
        clock = ToolClock(ToolWait(), "0")
        return await run_episode(client, model="m", trajectory="0.0", domain=domain, task=task, clock=clock)


@needs_bubblewrap
async def test_the_expert_solves_every_kind_through_the_agents_loop() -> None:
    tasks = [task_of(kind, seed) for kind in ("fix", "write", "config") for seed in (5, 6)]
    outcomes = await asyncio.gather(*(played(DOMAIN, task) for task in tasks))
    assert [outcome.reward for outcome in outcomes] == [1.0] * len(tasks), outcomes
    assert all(outcome.tool_errors == 0 and outcome.tool_calls >= 2 for outcome in outcomes)


async def test_a_sandbox_that_fails_ends_the_trajectory_with_its_reason() -> None:
    class Failing(FakeSandbox):
        async def run(self, *_: Any, **__: Any) -> Result:
            raise ForgeError("sandbox: no more of it")

    closed: list[str] = []

    async def open_sandbox() -> Sandbox:
        sandbox = Failing()

        async def close() -> None:
            closed.append("closed")

        sandbox.close = close  # type: ignore[method-assign]
        return sandbox

    outcome = await played(Coding(open_sandbox), task_of("fix"))
    assert (outcome.reward, outcome.reason) == (None, DeathReason.ENVIRONMENT)
    assert outcome.detail == "ForgeError: sandbox: no more of it"
    assert closed == ["closed"]


@needs_bubblewrap
@pytest.mark.timeout(240)
def test_a_live_run_plays_it_to_the_end(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    settings = [
        'domains=[{name="coding"}]',
        'engine={kind="fake",max_context=1024}',
        "queue={n=4,batch=2,concurrency=2,group=2,item_timeout_s=60}",
        "eval.tasks=0",
        "stop={items=4}",
    ]
    sets = [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-m", "forge", "run", "quickstart", "--runs", str(tmp_path), *sets],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = RunFolder.open((tmp_path / "latest").resolve())
    summary = folder.read("summary.json")
    assert summary is not None
    assert summary["items_submitted"] == 4
    assert not any(summary["dead"].values())
