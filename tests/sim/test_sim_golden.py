"""One scenario's summary to the last digit: a change in the simulated world shows here, wanted or not.

When it is wanted: `FORGE_UPDATE_GOLDEN=1 pytest tests/sim/test_sim_golden.py` and review the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from sim_scenarios import build

from forge.metrics import summarise
from sim.world import simulate

GOLDEN = Path(__file__).parent.parent / "golden" / "sim_summary.json"


def test_summary_is_golden() -> None:
    scenario = build(
        {"n": 16, "batch": 4, "concurrency": 12, "group": 4, "item_timeout_s": 8.0},
        policy={"scheduler": {"kind": "windowed_fifo", "fraction": 0.3}, "sync": {"k": 2, "mode": "drain"}},
        tool_wait={"median_s": 0.5, "sigma": 1.5, "cap_s": 30.0},
        sim={"instance_mtbf_s": 5.0, "instance_repair_s": 1.0, "domains": {"agent": {"death_rate": 0.1}}},
        engine={"instances": 2},
    )
    summary = summarise(simulate(scenario).events, scenario)
    for text in ("estimators", "null_reasons"):  # prose, not figures
        del summary[text]
    if os.environ.get("FORGE_UPDATE_GOLDEN"):
        GOLDEN.write_text(json.dumps(summary, indent=2) + "\n")
    assert json.loads(json.dumps(summary)) == json.loads(GOLDEN.read_text())
