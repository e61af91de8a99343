"""The README's tables of a scenario: they load together, run, and say what the defaults are."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from forge.cost import load_calibration
from forge.policies import Conditional
from forge.scenario import Scenario, parse
from forge.sections_rollout import Prefill, Speculation, TierSizes
from sim.machines import machines
from sim.space_text import from_table, space_of
from sim.streaming import stream

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
TABLES = "\n".join(block for block in BLOCKS if block.startswith("[sim."))
(CALIBRATION,) = [block for block in BLOCKS if block.startswith("[deployments.")]


REPLAY = next(
    b for b in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL) if "traces" in b
)


def test_a_trace_is_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two requests, the second longer by three blocks."""
    rows = [
        {"timestamp": 60_000 * i, "input_length": 512 * n + 9, "output_length": 4, "hash_ids": list(range(n))}
        for i, n in enumerate((5, 8))
    ]
    monkeypatch.chdir(tmp_path)
    Path("conversation_trace.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    exec(compile(REPLAY, "README.md", "exec"), {})
    ttft, hit = map(float, capsys.readouterr().out.split())
    assert 0 < ttft < 10
    assert hit == 5 * 512 / (13 * 512 + 18)


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    sim: dict[str, Any] = tomllib.loads(TABLES)["sim"]
    (tmp_path / sim["deployment"]["calibration"]).write_text(CALIBRATION, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    small = {"n": 4, "batch": 2, "concurrency": 4, "group": 2}
    rest = {"name": "readme", "stop": {"items": 4}, "queue": small, "domains": [{"name": "agent"}]}
    return parse(rest | {"engine": {"instances": 3}, "sim": sim}, "README.md")


def test_the_tables_load_together_and_run(scenario: Scenario) -> None:
    made = machines(scenario)
    assert (len(made.instances), made.front) == (5, 3)
    assert made.stores is not None
    assert stream(scenario).summary()["items_consumed"] == 4


def test_every_table_is_there_once() -> None:
    names = re.findall(r"^\[(.+)\]$", "\n".join(BLOCKS), re.MULTILINE)
    tables = [
        "sim.deployment",
        "sim.deployment.prefill",
        "policy.placement",
        "sim.tiers",
        "policy.kv",
        "sim.speculation",
        "policy.speculation",
    ]
    assert names == [*tables, 'deployments."qwen3_8b h100_sxm vllm TP2"', "tune"]


def test_the_search_space_is_one(scenario: Scenario) -> None:
    (block,) = [tomllib.loads(block) for block in BLOCKS if block.startswith("[tune]")]
    space = space_of(from_table(block["tune"], "README.md"), scenario)
    assert sorted(str(one) for one in space.dimensions) == ["0..1", "0.1..0.9", "2, 4, 8", "least_loaded, dynamo"]


def test_the_calibration_is_the_one_that_the_deployment_names(scenario: Scenario) -> None:
    deployed = scenario.sim.deployment
    assert deployed is not None
    assert deployed.calibration is not None
    found = load_calibration(Path(deployed.calibration), deployed.calibrated)
    assert (found.efficiencies.flops, found.decode_factor, found.error["ttft"]) == (0.61, 1.02, 0.21)


def test_defaults_are_what_the_comments_say(scenario: Scenario) -> None:
    deployed, heads = scenario.sim.deployment, scenario.sim.speculation
    assert deployed is not None
    assert deployed.prefill is not None
    pool = Prefill()
    assert (pool.tp, pool.ep, pool.dp, pool.bandwidth) == (1, 1, 1, None)
    assert scenario.policy.placement == Conditional()
    assert scenario.sim.tiers == TierSizes(l2_gib=200, l3_gib=2000), "its other keys are the defaults"
    assert heads is not None
    assert heads.draft_share == Speculation().draft_share
