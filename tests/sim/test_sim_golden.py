"""One scenario's summary to the last digit: a change in the simulated world shows here, wanted or not.

When it is wanted: `FORGE_UPDATE_GOLDEN=1 pytest tests/sim/test_sim_golden.py` and review the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sim_scenarios import build

from forge.metrics import summarise
from forge.scenario import Scenario
from forge.types import Json
from sim.world import simulate

GOLDEN = Path(__file__).parent.parent / "golden"


def golden(scenario: Scenario, name: str) -> Json:
    """The summary of a run, which must be that of the file."""
    summary = summarise(simulate(scenario).events, scenario)
    for text in ("estimators", "null_reasons"):  # prose, not figures
        del summary[text]
    path = GOLDEN / name
    if os.environ.get("FORGE_UPDATE_GOLDEN"):
        path.write_text(json.dumps(summary, indent=2) + "\n")
    assert json.loads(json.dumps(summary)) == json.loads(path.read_text())
    return summary


def test_summary_is_golden() -> None:
    scenario = build(
        {"n": 16, "batch": 4, "concurrency": 12, "group": 4, "item_timeout_s": 8.0},
        policy={"scheduler": {"kind": "windowed_fifo", "fraction": 0.3}, "sync": {"k": 2, "mode": "drain"}},
        tool_wait={"median_s": 0.5, "sigma": 1.5, "cap_s": 30.0},
        sim={"instance_mtbf_s": 5.0, "instance_repair_s": 1.0, "domains": {"agent": {"death_rate": 0.1}}},
        engine={"instances": 2},
    )
    golden(scenario, "sim_summary.json")


def test_the_straggler_escape_is_golden() -> None:
    """Items that take minutes among ones of a second; some of the parked ones are trained on, some die stale."""
    escape = {"park_items": 2, "park_after_s": 4.0, "park_reach": 12}
    scenario = build(
        {"n": 16, "batch": 4, "concurrency": 12, "group": 2, "item_timeout_s": 1000.0},
        policy={"scheduler": {"kind": "windowed_fifo", "fraction": 0.3, **escape}},
        tool_wait={"median_s": 0.5, "sigma": 2.0, "cap_s": 200.0},
        items=120,
    )
    summary = golden(scenario, "sim_escape.json")
    assert summary["law_violations"] == []
    assert summary["items_parked"] > summary["dead"]["stale"] > 0
