"""`forge sim --no-trace` and its capacity plan."""

from __future__ import annotations

import json
from pathlib import Path

from agent_scenarios import agents
from typer.testing import CliRunner

from forge import scenario as scenarios
from forge.cli import app, campaign, simulate
from forge.report.capacity import bottleneck, plan
from sim.streaming import stream


def test_folder_without_a_trace(tmp_path: Path) -> None:
    scenario = agents(items=16)
    folder, summary, planned = campaign.run(scenario, tmp_path)
    assert summary == json.loads(json.dumps(stream(scenario).summary()))
    assert json.loads((folder.path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert not folder.trace.exists()
    assert "--no-trace" in (folder.path / "README.txt").read_text()
    assert (folder.path / "report.html").is_file()
    assert (folder.path / "capacity.txt").read_text() == planned
    for label in ("A day at this pace", "Bound by", "Rollout devices", "Lag", "Time to first token"):
        assert label in planned
    assert "3 x h100_sxm" in planned


def test_devices_that_compute_prompts_are_counted() -> None:
    scenario = agents(items=4, deployment={"prefill": {"instances": 5, "tp": 2}})
    done = stream(scenario)
    assert ("Rollout devices", "3 x h100_sxm for answers, 10 more for prompts") in plan(
        scenario, done.run, done.summary()
    )


def test_command(tmp_path: Path) -> None:
    assert simulate.sim  # the command
    args = ["sim", "quickstart", "--no-trace", "--json", "--runs", str(tmp_path), "--set", "stop.seconds=20"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["world"] == "sim"


def test_what_bounds_a_run() -> None:
    assert bottleneck({"trainer_idle_fraction": 0.05, "engine_idle_fraction": 0.5}) == "the trainer"
    assert bottleneck({"trainer_idle_fraction": 0.5, "engine_idle_fraction": 0.1}) == "rollout"
    assert bottleneck({"trainer_idle_fraction": 0.5, "engine_idle_fraction": 0.5}).startswith("neither")


def test_the_campaign_that_ships() -> None:
    """A sliver of it."""
    scenario = scenarios.load("campaign_m25", ["stop.items=4"])
    summary = stream(scenario).summary()
    assert summary["items_submitted"] == 4
    assert summary["law_violations"] == []
