"""Programs of others as rollout workers: what becomes of one that works, and of those that do not."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from forge.agents.loop import ToolClock
from forge.bench.blackbox_policy import ScriptedPolicy
from forge.blackbox.door import Refused, Requests
from forge.blackbox.launcher import Gateway, Launch, Played
from forge.blackbox.recipe import Recipe
from forge.blackbox.reporting import told
from forge.domains.base import Task
from forge.domains.registry import get_domain
from forge.gateway.app import create_app
from forge.gateway.fake_chat import FakeChatCodec, Turn
from forge.gateway.server import serve
from forge.gateway.tool_format import ToolCall, render
from forge.sandbox.battery import left
from forge.sandbox.holder import PROGRAMS as NEEDED
from forge.sections import ToolWait
from forge.types import DeathReason

pytestmark = pytest.mark.skipif(
    any(shutil.which(name) is None for name in NEEDED),
    reason="needs bubblewrap (apt-get install bubblewrap util-linux)",
)
AGENT = (Path(__file__).parent / "fake_agent.py").read_text(encoding="utf-8").replace("$", "$$")


def recipe(*command: str, **limits: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "command": ("python3", "$home/agent.py", *command),
            "environment": {"BASE_URL": "$base_url"},
            "home": {"agent.py": AGENT, "task.json": "$task_json"},
            "answer": ".answer",
            "exit": {"failed": [3]},
            "limits": {"seconds": 20, "memory_mib": 256, "processes": 32, "output_kib": 16, "home_mib": 8, **limits},
        }
    )


class Served:
    """A gateway before a policy that runs `command` for a task with files, calculates for one without, then says so."""

    def __init__(self, command: str = "") -> None:
        self.command = command
        self.policy = ScriptedPolicy(self.reply)
        self.url = ""

    def reply(self, turns: Sequence[Turn]) -> str:
        if turns[-2].role == "tool":
            return turns[-2].text if "calc" in turns[0].text else "done"
        if "calc" in turns[0].text:
            return render("", [ToolCall("calc", json.dumps({"expression": turns[-2].text.removeprefix("Compute ")}))])
        return render("", [ToolCall("bash", json.dumps({"command": self.command}))])

    async def play(self, one: Recipe, task: Task, trajectory: str = "1.0.0") -> Played:
        gateway = Gateway(url=self.url, model="m")
        return await Launch(one, gateway, trajectory, get_domain(task.domain), task, ToolClock(ToolWait(), "x")).play()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    server = await serve(create_app(one.policy, FakeChatCodec()))
    one.url = server.url
    yield one
    await server.stop()


async def nothing_left(before: dict[str, int]) -> None:
    """The gateway, in this process too, needs a moment to close its side of connections."""
    for _ in range(100):
        if left() == before:
            break
        await asyncio.sleep(0.02)
    assert left() == before


CODING = get_domain("coding").task("train", 0, 1)
CALC = get_domain("calc").task("train", 0, 0)


async def test_a_program_does_a_task_in_its_files_and_the_verifier_says_so(served: Served) -> None:
    served.command = f"cat > {CODING.data['path']} <<'END'\n{CODING.data['solution']}\nEND"
    played = await served.play(recipe("work"), CODING)
    assert (played.outcome.reward, played.outcome.reason) == (1.0, None)
    assert played.result is not None
    assert (played.result.exit_code, played.result.output) == (0, "done\n")
    records = served.policy.records["1.0.0"]
    assert [(one.parent, one.fork) for one in records] == [(None, "root"), (0, None)]


async def test_a_program_that_does_it_wrongly_has_no_reward(served: Served) -> None:
    served.command = f"echo nothing > {CODING.data['path']}"
    played = await served.play(recipe("work"), CODING)
    assert (played.outcome.reward, played.outcome.reason) == (0.0, None)


async def test_tools_of_a_task_are_had_through_the_door(served: Served) -> None:
    played = await served.play(recipe("work"), CALC)
    assert played.outcome.reward == 1.0
    assert (played.outcome.tool_calls, played.outcome.tool_errors) == (1, 0)


async def test_nothing_else_is_reached(served: Served) -> None:
    host = served.url.removeprefix("http://")
    played = await served.play(recipe("reach", host), CALC)
    assert played.result is not None
    lines = played.result.output.splitlines()
    assert lines == [
        "/home/agent /workspace",
        "completions 403",
        "report 403",
        "report 404",
        "metrics 403",
        "nothing at 1.1.1.1",
        f"nothing at {host}",
    ]
    assert served.policy.records == {}


@pytest.mark.parametrize(
    ("mode", "limits", "reason", "says"),
    [
        ("hang", {"seconds": 1}, DeathReason.TIMEOUT, "over 1 s"),
        ("flood", {}, DeathReason.AGENT_CRASH, "wrote more than 256 KiB"),
        ("fork", {"seconds": 2}, DeathReason.TIMEOUT, "over 2 s"),
        ("crash", {}, DeathReason.AGENT_CRASH, "exit code 1: RuntimeError: it broke"),
        ("7", {}, DeathReason.AGENT_CRASH, "exit code 7: it said nothing"),
    ],
)
async def test_what_misbehaves_is_dead_with_its_reason_and_nothing_is_left(
    served: Served, mode: str, limits: dict[str, Any], reason: DeathReason, says: str
) -> None:
    before, began = left(), time.monotonic()
    played = await served.play(recipe(mode, **limits), CALC)
    assert (played.outcome.reward, played.outcome.reason) == (None, reason)
    assert says in played.outcome.detail
    assert time.monotonic() - began < 10
    await nothing_left(before)
    assert told(played.outcome)["reason"] == reason.value


async def test_who_gives_up_has_failed_and_is_not_dead(served: Served) -> None:
    played = await served.play(recipe("3"), CALC)
    assert (played.outcome.reward, played.outcome.reason) == (0.0, None)
    assert told(played.outcome) == {"reward": 0.0, "ended": True}


async def test_a_daemon_ends_with_its_program(served: Served) -> None:
    before = left()
    assert (await served.play(recipe("daemon"), CALC)).outcome.reward == 1.0
    await nothing_left(before)


async def test_who_is_cancelled_leaves_nothing(served: Served) -> None:
    before = left()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await served.play(recipe("hang"), CALC)
    await nothing_left(before)


async def test_a_folder_that_is_missing_is_an_environment_failure(served: Served) -> None:
    one = recipe("work").model_copy(update={"folders": ("/nowhere",)})
    played = await served.play(one, CALC)
    assert (played.outcome.reason, played.outcome.reward) == (DeathReason.ENVIRONMENT, None)
    assert "/nowhere: no such folder" in played.outcome.detail


# --- the door's view of requests ------


def request(path: str, body: bytes = b"") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_requests_pass_whole_however_they_come(cut: int) -> None:
    both = request("/t/a/v1/messages?beta=true", b"one") + request("/t/a/v1/models", b"two")
    requests = Requests("/t/a")
    assert b"".join(requests.feed(both[i : i + cut]) for i in range(0, len(both), cut)) == both


@pytest.mark.parametrize("path", ["/t/b/v1/x", "/t/a/report", "/t/a/%72eport", "/v1/models", "/t/ab/v1", "/health"])
@pytest.mark.parametrize("first", [True, False])
def test_what_leads_elsewhere_is_refused_first_or_later(path: str, first: bool) -> None:
    requests = Requests("/t/a")
    if not first:
        assert requests.feed(request("/t/a/v1/models"))
    with pytest.raises(Refused):
        requests.feed(request(path))


def test_tools_and_the_gateway_share_no_connection() -> None:
    requests = Requests("/t/a")
    requests.feed(request("/tools/calc", b"{}"))
    assert (requests.tool, bytes(requests.body), requests.is_whole) == ("calc", b"{}", True)
    with pytest.raises(Refused):
        requests.feed(request("/t/a/v1/models"))


@pytest.mark.parametrize("text", [b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x00", b"nonsense\r\n\r\n"])
def test_what_is_no_request_is_refused(text: bytes) -> None:
    with pytest.raises(Refused):
        Requests("/t/a").feed(text)
