"""Scaffolds at work through gateway and pool, on the deterministic engine with the expert policy."""

from __future__ import annotations

import json
from collections import Counter
from itertools import cycle, product
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from forge import scaffolds
from forge.agents.episode import ToolClock
from forge.agents.loop import run_episode
from forge.agents.record import rebuild
from forge.bench.scaffolds import play
from forge.domains.base import Domain, Task, opening
from forge.domains.registry import PURE
from forge.domains.tools import use_tool
from forge.gateway.fake_chat import FakeChatCodec
from forge.live.recording import POOL
from forge.pool.reader import PoolReader
from forge.sections import ToolWait
from forge.types import Outcome, Trajectory

#: tasks that take seven lookups, and three with a sum
LONG = {
    "chain": next(seed for seed in range(100) if PURE["chain"]().task("train", seed, 0).difficulty == 7),
    "shop": next(seed for seed in range(100) if PURE["shop"]().task("train", seed, 0).difficulty == 3),
}


def played(folder: Path, *runs: tuple[str, str]) -> tuple[list[Outcome], dict[str, Trajectory]]:
    """(scaffold, domain) each; the outcomes, and what the pool holds."""
    outcomes = play([(scaffolds.get(name), domain, LONG.get(domain, 0)) for name, domain in runs], folder)
    with PoolReader(folder / POOL) as pool:
        kept = {one.id: one for position in range(len(runs)) for one in pool.trajectories(position)}
    return outcomes, kept


# --- the default is the plain loop it always was ------


class Echoing:
    """A server that calls a tool twice, one call broken, then answers; keeps the bodies of requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def reply(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.content)
        results = sum(one["role"] == "tool" for one in json.loads(request.content)["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": "5"}
        if results < 3:
            asked = ['{"expression":"2+3"}', "{oops"] if not results else ['{"expression":"1"}']
            calls = [
                {"id": f"c{results}{n}", "type": "function", "function": {"name": "calc", "arguments": one}}
                for n, one in enumerate(asked)
            ]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)

    def client(self) -> openai.AsyncOpenAI:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self.reply))
        return openai.AsyncOpenAI(base_url="http://model/v1", api_key="x", http_client=http)


async def plainly(client: openai.AsyncOpenAI, domain: Domain, task: Task) -> str:
    """The loop without any scaffold, spelled out."""
    environment = await domain.begin(task)
    messages: list[Any] = opening(task)
    tools: Any = list(domain.tools(task))
    for _ in range(domain.max_turns):
        reply = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=domain.max_tokens, tools=tools
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"
            result, _ = await use_tool(environment, call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def test_the_default_scaffold_sends_what_a_plain_loop_sends_byte_for_byte() -> None:
    domain = PURE["calc"]()
    task = domain.task("train", 0, 0)
    ours, theirs = Echoing(), Echoing()
    async with ours.client() as client:
        clock = ToolClock(ToolWait(), "0")
        outcome = await run_episode(client, model="m", trajectory="0.0", domain=domain, task=task, clock=clock)
    async with theirs.client() as client:
        await plainly(client, domain, task)
    assert len(ours.bodies) == 3
    assert ours.bodies == theirs.bodies
    assert (outcome.turns, outcome.tool_calls, outcome.tool_errors) == (3, 3, 1)
    assert (outcome.scaffold, outcome.faults, outcome.contexts) == (scaffolds.DEFAULT, {"arguments": 1}, None)


# --- every loop, dialect, strategy ------


def test_every_loop_solves_long_tasks_in_either_kind_of_dialect(tmp_path: Path) -> None:
    kinds = (("native", "chain"), ("xml", "shop"))
    runs = [(f"{loop}/{dialect}/all/rules", domain) for loop in scaffolds.LOOPS for dialect, domain in kinds]
    outcomes, kept = played(tmp_path, *runs)
    assert [o.reward for o in outcomes] == [1.0] * len(runs), outcomes
    assert all(len(kept[o.trajectory].completions) == o.turns for o in outcomes)
    assert {kept[o.trajectory].outcome.scaffold for o in outcomes} == {name for name, _ in runs}


def test_what_was_served_is_rebuilt_from_the_record_and_is_what_came(tmp_path: Path) -> None:
    """With a codec of bytes, a prompt's ids are its messages."""
    runs = [(f"{loop}/fence/{context}/bare", "chain") for loop in ("plain", "retry") for context in scaffolds.CONTEXTS]
    outcomes, kept = played(tmp_path, *runs)
    assert [o.reward for o in outcomes] == [1.0] * len(runs), outcomes
    grown = []
    for trajectory in kept.values():
        recorded = trajectory.outcome.contexts
        if recorded is None:
            grown.append(trajectory.outcome.scaffold.split("/")[2])
            continue
        shown = rebuild(recorded)
        assert [c.prompt_ids for c in trajectory.completions] == [FakeChatCodec().prompt(m, []) for m in shown]
    assert set(grown) == {"all", "cut-16"}, "all others changed what was there"


def test_a_window_shows_the_task_and_the_last_turns(tmp_path: Path) -> None:
    _, kept = played(tmp_path, ("plain/xml/window-2/bare", "chain"))
    recorded = kept["0"].outcome.contexts
    assert recorded is not None
    shown = [len(messages) for messages in rebuild(recorded)]
    assert shown == [1, 3, *[5] * (len(shown) - 2)]
    assert Counter(c.fork for c in kept["0"].completions)["truncation"] == len(shown) - 3


def test_the_policy_manages_its_context_by_tools(tmp_path: Path) -> None:
    outcomes, kept = played(tmp_path, ("plain/native/own/bare", "chain"), ("plain/xml/own/helpful", "chain"))
    assert [o.reward for o in outcomes] == [1.0, 1.0]
    for trajectory in kept.values():
        assert trajectory.outcome.contexts is not None
        log = trajectory.outcome.contexts["conversations"][0]["log"]
        assert [row["op"] for row in log if row["op"] != "append"] == ["summarise"]


@pytest.mark.parametrize(
    ("said", "faults"),
    [
        (['<tool_call>{"name": "calc", "arg</tool_call>'], {"malformed": 1}),
        (['<tool_call>{"name":"calc","arguments":{}}</tool_call>'], {"arguments": 1}),
        (['<tool_call>{"name":"calc","arguments":{"expression":"2+"}}</tool_call>'], {"failed": 1}),
        (['<tool_call>{"name":"calk","arguments":{}}</tool_call>'], {"unknown_tool": 1}),
        (['<tool_call>{"name":"calc","arguments":{"expression":"2"}}</tool_call>' * 2], {"several": 1}),
        (["I think not."], {"no_answer": 1}),
    ],
)
async def test_what_is_wrong_is_told_to_the_policy_and_counted_by_kind(said: list[str], faults: dict[str, int]) -> None:
    domain = PURE["calc"]()
    task = domain.task("train", 0, 0)
    replies, told = [*said, f"Answer: {task.data['answer']}"], list[str]()

    def reply(request: httpx.Request) -> httpx.Response:
        told.append(json.loads(request.content)["messages"][-1]["content"])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": replies[len(told) - 1]},
            "finish_reason": "stop",
        }
        body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)

    loop = "single" if "several" in faults else "react"
    if loop == "single":
        replies[-1] = task.data["answer"]
    http = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    async with openai.AsyncOpenAI(base_url="http://model/v1", api_key="x", http_client=http) as client:
        outcome = await run_episode(
            client,
            model="m",
            trajectory="0.0",
            domain=domain,
            task=task,
            clock=ToolClock(ToolWait(), "0"),
            scaffold=scaffolds.get(f"{loop}/hermes/all/bare"),
        )
    assert outcome.faults == faults
    assert outcome.reward == 1.0
    assert "error: " in told[1]


def test_one_in_many_of_the_zoo(tmp_path: Path) -> None:
    """Far more of them: -m slow."""
    check(tmp_path, scaffolds.zoo()[7::887])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_loop_with_every_dialect_and_context(tmp_path: Path) -> None:
    """1,840 scaffolds, styles in turn."""
    styles = cycle([*scaffolds.STYLES, "bare"])  # 9 of them, so that they shift against the contexts
    triples = product(scaffolds.LOOPS, scaffolds.DIALECTS, scaffolds.CONTEXTS)
    check(tmp_path, tuple(f"{'/'.join(parts)}/{next(styles)}" for parts in triples))


def check(folder: Path, names: tuple[str, ...]) -> None:
    environments = sorted(PURE)
    runs = [(scaffolds.get(name), environments[n % len(environments)], n) for n, name in enumerate(names)]
    outcomes = play(runs, folder)
    assert not [o for o in outcomes if o.reward is None]
    unsolved = [f"{o.scaffold} {run[1]}" for o, run in zip(outcomes, runs, strict=True) if o.reward != 1.0]
    assert len(unsolved) <= len(names) // 50, unsolved
