"""A live run on vLLM's own servers, killed under it. Minutes; needs `forge engine install vllm`."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from subprocess import Popen

import pytest

pytest.importorskip("torch")

from chaos_support import SCENARIO, check_exactly_once, start

from forge import trace as ev
from forge.rollout.vllm.install import found
from forge.runs import RunFolder

ENVIRONMENT = Path(os.environ.get("FORGE_VLLM", "engines/vllm")).absolute()
INSTALLED = found(ENVIRONMENT)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(INSTALLED.version is None, reason=f"no vLLM: {INSTALLED.why}; forge engine install vllm"),
]


def newest_pid(log: Path, process: str) -> int:
    """Of the last server that wrote this log."""
    return int(re.findall(rf"\({process} pid=(\d+)\)", log.read_text(errors="replace"))[-1])


def wait_for(trace: Path, event: str, count: int, process: Popen[bytes]) -> None:
    while not trace.is_file() or trace.read_text().count(f'"e":"{event}"') < count:
        assert process.poll() is None, "the run ended early"
        time.sleep(0.2)


def test_two_servers_killed_under_a_run_lose_and_double_nothing(tmp_path: Path) -> None:
    scenario = tmp_path / "chaos.toml"
    scenario.write_text(SCENARIO)
    engine = f'engine={{kind="vllm",instances=2,slots=16,max_context=512,vllm={{environment="{ENVIRONMENT}"}}}}'
    sets = [engine, "queue.item_timeout_s=300"]
    run = start("run", str(scenario), "--runs", str(tmp_path / "runs"), *(p for s in sets for p in ("--set", s)))
    folder = tmp_path / "runs" / "latest"
    wait_for(folder / "trace.jsonl", "committed", 2, run)
    os.kill(newest_pid(folder / "engine-0" / "vllm.log", "APIServer"), signal.SIGKILL)
    wait_for(folder / "trace.jsonl", "instance_down", 1, run)
    wait_for(folder / "trace.jsonl", "committed", 5, run)
    os.kill(newest_pid(folder / "engine-1" / "vllm.log", "EngineCore"), signal.SIGKILL)
    assert run.wait(timeout=1500) == 0
    opened = RunFolder.open(folder.resolve())
    check_exactly_once(opened)
    events = list(opened.events())
    assert {e.instance for e in events if isinstance(e, ev.InstanceDown)} == {0, 1}
    used = {e.instance for e in events if isinstance(e, ev.Routed)}
    assert used == {0, 1}, "both serve behind the one router"
