"""What surrounds the protocols: reports, budgets, access, health, metrics, the log of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from gateway_support import ScriptedBackend, live, until
from test_local import EchoEngine

from forge.gateway.access import access_tokens
from forge.gateway.budget import Budget
from forge.gateway.local import EngineBackend
from forge.gateway.report import Report, ToolRun, measured
from forge.gateway.request_log import RequestLog
from forge.gateway.tool_format import ToolCall, render
from forge.live.recording import PoolRecording
from forge.policies.dispatch import Mixed
from forge.pool.reader import PoolReader
from forge.types import DeathReason, ForgeError, ItemState, Json, Outcome

HELLO = [{"role": "user", "content": "hello"}]
CALLS = render("", [ToolCall("f", '{"a": 1}'), ToolCall("f", "{}")])
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]


async def say(client: Any, messages: Any = HELLO, **options: Any) -> Any:
    return (await client.chat.completions.create(model="m", messages=messages, **options)).choices[0].message


def test_parts_join_and_the_last_word_counts() -> None:
    first = Report(reward=1.0, reward_parts={"a": 1.0}, tools={"x": ToolRun(1.0, False)})
    second = Report(
        reason=DeathReason.TIMEOUT, detail="late", tools={"x": ToolRun(2.0, True), "y": ToolRun(3.0, False)}
    )
    whole = first.joined(second)
    assert (whole.reward, whole.reason) == (None, DeathReason.TIMEOUT)
    assert whole.joined(second) == whole == whole.joined(Report())
    outcome = whole.outcome(Outcome(trajectory="t", reward=None, reason=DeathReason.AGENT_CRASH, turns=4, tool_calls=9))
    assert (outcome.turns, outcome.tool_calls, outcome.tool_errors, outcome.tool_wait_s) == (4, 2, 1, 5.0)
    assert (outcome.reason, outcome.detail, outcome.reward_parts) == (DeathReason.TIMEOUT, "late", {"a": 1.0})


async def test_reports_are_checked_idempotent_and_end_a_trajectory() -> None:
    backend = EngineBackend(EchoEngine())
    async with live(backend) as server, server.client() as client, httpx.AsyncClient(base_url=server.url) as http:
        backend.sessions.attach(server.gateway)

        async def post(body: Json, name: str = "t1") -> httpx.Response:
            return await http.post(f"/t/{name}/report", json=body)

        assert (await post({"reward": 1})).status_code == 404
        await say(client)
        for bad in ({"reward": "1"}, {"reward": 1, "reason": "timeout"}, {"reason": "stale"}, {"tools": [{"id": "x"}]},
                    {"reward_parts": {"a": None}}, {"rewards": 1}, {"ended": 1}, {"reward": 10**400}):  # fmt: skip
            assert (await post(bad)).status_code == 400, bad
        part = {"reward": 0.5, "reward_parts": {"tests": 0.5}, "tools": [{"id": "x", "seconds": 1.5}]}
        for _ in range(2):
            told = (await post(part)).json()
        assert told["tools"] == [{"id": "x", "seconds": 1.5, "failed": False}]
        ends = [await post({"ended": True}) for _ in range(2)]
        assert [one.status_code for one in ends] == [200, 200]
        assert ends[0].json() == ends[1].json() == told | {"ended": True}
        assert (await post({"reward": 1.0})).status_code == 409
        assert not backend.sessions.open
        await say(client)  # nothing is recorded, so the name may begin anew
        assert (await post({"reward": 1.0})).status_code == 200
    backend.close()


async def test_what_nobody_reports_is_measured() -> None:
    backend = ScriptedBackend(lambda _t, prompt: "done" if "result" in prompt else CALLS)
    async with live(backend) as server, server.client() as client:
        reply = await say(client, tools=TOOLS)
        assert reply.tool_calls
        results = [{"role": "tool", "tool_call_id": call.id, "content": "result"} for call in reply.tool_calls]
        await say(client, [*HELLO, reply.model_dump(exclude_none=True), *results], tools=TOOLS)
        tree, records = server.gateway.tree("t1"), backend.records["t1"]
        found = measured("t1", tree, records, reason=DeathReason.TIMEOUT, detail="")
    assert (found.turns, found.tool_calls) == (2, 2)
    assert found.tool_wait_s == records[1].received_s - records[0].finished_s > 0


@pytest.mark.parametrize(("budget", "served"), [(Budget(calls=2), 2), (Budget(tokens=7), 2), (Budget(), 4)])
async def test_a_spent_budget_is_told_so_that_agents_stop(budget: Budget, served: int) -> None:
    backend = EngineBackend(EchoEngine(), budget=budget)  # "hello" and the end of the turn: 6 tokens
    async with live(backend) as server, server.client(max_retries=3) as client, server.client("t2") as other:
        backend.sessions.attach(server.gateway)
        for _ in range(served):
            await say(client)
        for _ in range(4 - served):
            with pytest.raises(openai.BadRequestError) as caught:
                await say(client)
            assert caught.value.code == "budget_spent"
            assert "context" not in caught.value.message  # the word on which agents compact, and ask again
        assert len(backend.sessions.open["t1"].completions) == served
        if served < 4:
            async with server.anthropic(max_retries=3) as claude:
                with pytest.raises(anthropic.BadRequestError, match="budget"):
                    await claude.messages.create(model="m", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
        await say(other)
    backend.close()


async def test_trajectories_are_recorded_once_they_are_over(tmp_path: Path) -> None:
    async def agents(names: list[str], act: Callable[[EngineBackend, httpx.AsyncClient], Any]) -> None:
        with PoolRecording(tmp_path) as recording:
            backend = EngineBackend(EchoEngine(), recording=recording, idle_s=0.0, start_s=recording.resumed_s)
            async with live(backend) as server, httpx.AsyncClient(base_url=server.url) as http:
                backend.sessions.attach(server.gateway)
                for name in names:
                    async with server.client(name) as client:
                        await say(client)
                await act(backend, http)
                backend.sessions.close_all("the gateway was stopped")
            backend.close()

    async def first(backend: EngineBackend, http: httpx.AsyncClient) -> None:
        await http.post("/t/good/report", json={"reward": 1.0, "reward_parts": {"x": 1.0}, "ended": True})
        await http.post("/t/bad/report", json={"reason": "agent_crash", "detail": "oh", "ended": True})
        await http.post("/t/rewarded/report", json={"reward": 0.25})
        backend.sessions.open["open"].in_flight += 1
        backend.sessions.close_idle()
        backend.sessions.open["open"].in_flight -= 1
        over = await http.post("/t/good/v1/chat/completions", json={"messages": HELLO})
        assert (over.status_code, over.json()["error"]["code"]) == (404, "trajectory_not_found")

    async def second(_backend: EngineBackend, http: httpx.AsyncClient) -> None:
        over = await http.post("/t/idle/v1/chat/completions", json={"messages": HELLO})
        assert over.status_code == 404

    await agents(["good", "bad", "rewarded", "idle", "open"], first)
    await agents(["later"], second)
    with PoolReader(tmp_path / "pool.sqlite") as pool:
        ended = {pool.item(p).task["trajectory"]: pool.trajectories(p)[0] for p in range(6)}
        times = [pool.item(p).submitted_s for p in range(6)]
        assert pool.positions(ItemState.FINISHED) == [0, 2]
    assert times == sorted(times)
    outcomes = {name: (t.outcome.reward, t.outcome.reason and t.outcome.reason.value) for name, t in ended.items()}
    assert outcomes == {
        "good": (1.0, None),
        "bad": (None, "agent_crash"),
        "rewarded": (0.25, None),
        "idle": (None, "timeout"),
        "open": (None, "environment"),
        "later": (None, "environment"),
    }
    assert ended["good"].outcome.reward_parts == {"x": 1.0}
    assert bytes(ended["good"].completions[0].sampled_ids[:-1]) == b"hello"


async def test_a_killed_recording_goes_on(tmp_path: Path) -> None:
    killed = PoolRecording(tmp_path)
    killed.begin("a", 5.0)
    killed.__exit__(None, None, None)  # a process that ended without a word
    with PoolRecording(tmp_path) as recording:
        assert recording.resumed_s == 5.0
        assert recording.has_ended("a")
        recording.begin("b", 6.0)
        recording.end((), Outcome(trajectory="b", reward=1.0), 7.0)
    with PoolReader(tmp_path / "pool.sqlite") as pool:
        assert [pool.item(p).death for p in (0, 1)] == [DeathReason.ENVIRONMENT, DeathReason.AGENT_CRASH]


async def test_a_full_engine_refuses_by_the_dispatch_policy() -> None:
    engine = EchoEngine()
    engine.endless = True
    backend = EngineBackend(engine, dispatch=Mixed(refuse_above=1, retry_after_s=0.5))
    async with live(backend, retry_grace_s=0) as server, server.client() as client:
        asking = asyncio.create_task(say(client))
        await until(lambda: engine.running)
        with pytest.raises(openai.RateLimitError) as caught:
            await say(client)
        assert caught.value.response.headers["retry-after-ms"] == "500"
        asking.cancel()
        await until(lambda: not engine.running)
    backend.close()


async def test_only_those_with_a_token_are_let_in() -> None:
    backend = ScriptedBackend(lambda _t, _p: "ok")
    async with live(backend, tokens=("s3cret", "other")) as server:
        for key, may in (("s3cret", True), ("other", True), ("s3cre", False), ("", False)):
            async with server.client(api_key=key or "x") as client, server.anthropic(api_key=key or "x") as claude:
                if may:
                    assert (await say(client)).content == "ok"
                    await claude.messages.create(model="m", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
                else:
                    with pytest.raises(openai.AuthenticationError):
                        await say(client)
                    with pytest.raises(anthropic.AuthenticationError):
                        await claude.messages.create(model="m", max_tokens=9, messages=HELLO)  # type: ignore[arg-type]
        async with httpx.AsyncClient(base_url=server.url) as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/metrics")).status_code == 401
            known = {"authorization": "Bearer s3cret"}
            assert (await http.get("/metrics", headers=known)).status_code == 200
            # The token is no trajectory: all agents that have it would be one.
            nameless = await http.post("/v1/chat/completions", json={"messages": HELLO}, headers=known)
            assert nameless.status_code == 401
            assert "No trajectory" in nameless.text
    assert set(backend.records) == {"t1"}


def test_whoever_can_be_reached_needs_tokens(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(ForgeError, match=r"0\.0\.0\.0"):
        access_tokens("0.0.0.0", None, "--host", "--tokens")
    with pytest.raises(ForgeError, match="cannot be read"):
        access_tokens("127.0.0.1", file, "--host", "--tokens")
    file.write_text("# none yet\n\n")
    with pytest.raises(ForgeError, match="holds no token"):
        access_tokens("127.0.0.1", file, "--host", "--tokens")
    file.write_text("# two\nabc\n  d e \n")
    assert access_tokens("0.0.0.0", file, "--host", "--tokens") == ("abc", "d e")
    assert access_tokens("127.0.0.1", None, "--host", "--tokens") == ()


async def test_health_metrics_and_the_log_tell_what_happened(tmp_path: Path) -> None:
    backend = ScriptedBackend(lambda _t, prompt: "done" if "again" in prompt else "a reply")
    with RequestLog(tmp_path / "log.jsonl") as log:
        async with (
            live(backend, log=log) as server,
            server.client() as client,
            httpx.AsyncClient(base_url=server.url) as http,
        ):
            reply = await say(client)
            changed = [*HELLO, {"role": "assistant", "content": "another"}, {"role": "user", "content": "again"}]
            same = [*HELLO, reply.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
            await say(client, same)
            await say(client, changed)
            with pytest.raises(openai.BadRequestError):
                await say(client, [])
            assert (await http.get("/health")).json()["status"] == "ok"
            backend.fault = "the engine failed"
            sick = await http.get("/health")
            assert (sick.status_code, sick.json()["fault"]) == (503, "the engine failed")
            lines = (await http.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert values['forge_gateway_requests_total{protocol="chat",status="200"}'] == "3.0"
    assert values['forge_gateway_requests_total{protocol="chat",status="400"}'] == "1.0"
    assert values['forge_gateway_forks_total{reason="root"}'] == "1.0"
    assert values['forge_gateway_forks_total{reason="rewrite"}'] == "1.0"
    assert values['forge_gateway_echoes_total{kind="exact"}'] == "1.0"
    assert float(values["forge_gateway_sampled_tokens_total"]) == sum(len(r.sampled_ids) for r in backend.records["t1"])
    assert (values["forge_gateway_in_flight"], values["forge_gateway_ttft_seconds_count"]) == ("0.0", "3.0")
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == [200, 200, 200, 400]
    assert [row["completions"] for row in rows[:3]] == [
        [{"index": 0, "parent": None, "fork": "root"}],
        [{"index": 1, "parent": 0, "fork": None}],
        [{"index": 2, "parent": None, "fork": "rewrite"}],
    ]
    assert all(row["delivered"] and row["trajectory"] == "t1" for row in rows[:3])
