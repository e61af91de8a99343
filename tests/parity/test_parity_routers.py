"""Every router replays, with reports that come late and instances that crash."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from forge import trace as ev
from forge.policies import AnyRouter
from forge.replay import replay_driver, replay_policies
from sim.world import simulate

sys.path.append(str(Path(__file__).parents[1] / "sim"))
from agent_scenarios import agents

ROUTERS = get_args(get_args(AnyRouter)[0])


@pytest.mark.parametrize("cls", ROUTERS)
def test_a_campaign_with_late_reports_replays(cls: type[Any]) -> None:
    given = agents(items=10, policy={"router": {"kind": cls().kind}}, sim={"instance_mtbf_s": 60.0})
    events: list[ev.Event] = []
    simulate(given, (events.append,))
    reports = [event for event in events if isinstance(event, ev.Reported)]
    assert any(report.queued_tokens for report in reports), "nothing ever waits: reports tell routers little"
    assert all(report.seen_s == pytest.approx(round(2 * report.seen_s) / 2) for report in reports)
    assert all(report.seen_s + 0.1 <= report.t + 1e-9 for report in reports)
    reread = [ev.decode(ev.encode(event)) for event in events]
    for replayed in (replay_policies(reread, given), replay_driver(reread, given)):
        assert replayed.is_same, replayed.difference
