"""The gateway's backend in a live run, without a run around it: budgets and reports."""

from __future__ import annotations

from typing import Any

import pytest

from forge.gateway.app import create_app
from forge.gateway.backend import UnknownTrajectoryError
from forge.gateway.budget import Budget, BudgetSpent
from forge.gateway.fake_chat import FakeChatCodec
from forge.gateway.report import Report, ToolRun
from forge.live.backend import LiveBackend, OpenTrajectory
from forge.rollout.engine import Sampling
from forge.types import Completion, DeathReason, Outcome


class NoFleet:
    max_context = 100

    def versions(self) -> list[int]:
        return []


def backend_of(ended: list[Outcome], **budget: int) -> LiveBackend:
    nothing: Any = None
    fleet: Any = NoFleet()
    backend = LiveBackend(
        model="m", fleet=fleet, control=nothing, clock=lambda: 1.0, budget=Budget(**budget), ended=ended.append
    )
    backend.gateway = create_app(backend, FakeChatCodec()).state.gateway
    backend.admit(OpenTrajectory(id="0.0.0", sampling=Sampling(), position=None, member=0))
    return backend


def completion(index: int) -> Completion:
    return Completion(
        trajectory="0.0.0", index=index, prompt_ids=(1,), sampled_ids=(2, 3), logprobs=(-1.0, -1.0), versions=(0, 0),
        finish="stop", temperature=1.0, received_s=0.0, first_token_s=0.0, finished_s=0.0, instance=0,
    )  # fmt: skip


def test_what_overdraws_is_remembered_for_its_outcome() -> None:
    backend = backend_of([], tokens=4)
    assert backend.fault is not None
    for index in range(2):
        backend.open("0.0.0")
        backend.record(completion(index))
    with pytest.raises(BudgetSpent, match="4 sampled tokens"):
        backend.open("0.0.0")
    closed = backend.close("0.0.0")
    assert closed is not None
    assert "4 sampled tokens" in (closed.overdrawn or "")


def test_a_report_may_end_a_trajectory_of_a_run() -> None:
    ended: list[Outcome] = []
    backend = backend_of(ended)
    assert backend.gateway is not None
    backend.record(completion(0))
    backend.gateway.report("0.0.0", Report(tools={"x": ToolRun(2.0, True)}))
    assert not ended
    assert backend.trajectories["0.0.0"].report.tools
    backend.gateway.report("0.0.0", Report(reward=0.5, ended=True))
    assert [(o.reward, o.turns, o.tool_errors, o.tool_wait_s) for o in ended] == [(0.5, 1, 1, 2.0)]
    backend.close("0.0.0")
    with pytest.raises(UnknownTrajectoryError):
        backend.report("0.0.0", Report(reason=DeathReason.TIMEOUT))
