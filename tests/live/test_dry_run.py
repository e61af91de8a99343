"""`forge run --dry-run`: the processes of every scenario that ships, and what the machine lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forge import scenario as scenarios
from forge.cli import main
from forge.live.dry_run import Process, lacking, processes
from forge.scenario import parse
from forge.types import ForgeError

GPU = sorted(path.stem for path in scenarios.scenarios_dir().glob("gpu_*.toml"))


def shown(name: str, *sets: str) -> list[Process]:
    return processes(scenarios.load(name, sets), Path("runs/x"))


def test_there_are_scenarios_for_a_node_and_for_several() -> None:
    hosts = {scenarios.load(name).engine.vllm.hosts for name in GPU}
    assert () in hosts
    assert max(map(len, hosts)) > 1


@pytest.mark.parametrize("name", GPU)
def test_no_port_and_no_gpu_is_given_twice(name: str) -> None:
    scenario = scenarios.load(name)
    servers = [one for one in shown(name) if one.name.startswith("vllm-")]
    assert len(servers) == scenario.engine.instances
    places = [(one.host, one.port) for one in servers]
    assert len(set(places)) == len(places)
    gpus = [(one.host, g) for one in servers for g in visible(one)]
    ranks = [("this", str(i)) for i in range(scenario.train.ranks)]
    assert len(set(gpus + ranks)) == len(gpus) + len(ranks), "an instance and a rank would share a GPU"


def visible(process: Process) -> list[str]:
    found = re.search(r"CUDA_VISIBLE_DEVICES=([\d,]+)", process.command)
    assert found, process.command
    return found[1].split(",")


def test_instances_are_spread_over_hosts_and_started_there() -> None:
    servers = [one for one in shown("gpu_nodes") if one.name.startswith("vllm-")]
    assert [one.host for one in servers] == ["node-1"] * 8 + ["node-2"] * 8
    assert all(f"ssh -tt {one.host} " in one.command and f"--host {one.host}" in one.command for one in servers)


def test_it_starts_nothing_and_says_what_is_lacking(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["forge", "run", "gpu_node", "--dry-run", "--json"])
    assert main() == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in said["processes"]][:3] == ["run", "agents", "trainer"]
    assert any("qwen3_8b" in lack for lack in said["lacking"])


def test_what_is_wrong_anywhere_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["forge", "run", "gpu_node", "--dry-run", "--set", "queue.group=1"])
    assert main() == 2
    assert "queue.group = 1" in capsys.readouterr().err


def test_the_quickstart_lacks_nothing() -> None:
    assert lacking(scenarios.load("quickstart")) == []
    assert [one.name for one in shown("quickstart")] == ["run", "agents", "trainer", "engine-0"]


def test_a_missing_environment_names_the_way_out() -> None:
    found = lacking(scenarios.load("quickstart_vllm", ["engine.vllm.environment=/nowhere"]))
    assert len(found) == 1
    assert "/nowhere" in found[0]
    assert "forge engine install vllm" in found[0]


def test_servers_elsewhere_need_known_ports() -> None:
    engine = {"kind": "vllm", "vllm": {"hosts": ["a"]}}
    with pytest.raises(ForgeError, match=r"vllm\.port = 0"):
        parse({"name": "t", "stop": {"items": 1}, "domains": [{"name": "calc"}], "engine": engine}, "t")
