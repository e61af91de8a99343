"""How servers of vLLM are installed, started and repaired; none is started here."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from forge.rollout.engine import EngineError
from forge.rollout.vllm import plugin
from forge.rollout.vllm.command import Launch, launch
from forge.rollout.vllm.install import found, install
from forge.rollout.vllm.server import Server, served_folder, start, write_plugin
from forge.scenario import Scenario, parse
from forge.types import ForgeError


def scenario(**vllm: object) -> Scenario:
    engine = {"kind": "vllm", "instances": 4, "slots": 7, "max_context": 3000, "vllm": vllm}
    return parse({"name": "t", "stop": {"items": 1}, "domains": [{"name": "calc"}], "engine": engine}, "test")


def test_a_cpu_server_never_cuts_a_prompt() -> None:
    argv = launch(scenario(), 0, Path("/m"), 9000, Path("/s")).argv
    assert "--no-enable-chunked-prefill" in argv
    assert int(argv[argv.index("--max-num-batched-tokens") + 1]) >= 3000


def test_arguments_of_ones_own_come_last_and_win() -> None:
    one = launch(scenario(args=["--max-num-seqs", "3"]), 1, Path("/m"), 9000, Path("/s"))
    assert one.argv[-2:] == ("--max-num-seqs", "3")
    assert one.url == "http://127.0.0.1:9000"
    assert one.env["PYTHONPATH"] == "/s/plugin"


def test_gpus_of_instances_on_one_host_follow_each_other() -> None:
    two_hosts = scenario(gpus=2, first_gpu=1, hosts=["a", "b"], port=9000)
    seen = [launch(two_hosts, i, Path("/m"), 9000 + i, Path("/s")).argv for i in range(4)]
    assert [argv[2] for argv in seen] == ["a", "a", "b", "b"]
    assert ["CUDA_VISIBLE_DEVICES=1,2" in argv[3] for argv in seen] == [True, False, True, False]
    assert ["CUDA_VISIBLE_DEVICES=3,4" in argv[3] for argv in seen] == [False, True, False, True]


def test_the_plug_in_is_found_by_its_entry_point(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    write_plugin(tmp_path)  # as a server that is started again does
    (entry,) = [
        entry
        for found in importlib.metadata.distributions(path=[str(tmp_path)])
        for entry in found.entry_points.select(group="vllm.general_plugins")
    ]
    check = f"import {entry.module} as m; assert callable(m.{entry.attr})"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", check], env=env, cwd=tmp_path).returncode == 0


def test_the_repaired_expansion_copies_what_the_broken_one_leaves_unset() -> None:
    sums = torch.tensor([2, 2, 5], dtype=torch.int32)
    temperatures = torch.tensor([0.5, 9.0, 0.25])
    assert plugin.expand(temperatures, sums, 5).tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    assert plugin.expand(torch.tensor([0.0, 9.0, 2.0]), sums, 5, 0, 1).tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    assert plugin.expands(plugin.expand)
    assert not plugin.expands(lambda x, sums, count: x.new_zeros(count))  # noqa: ARG005 - fills a copy


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    """As an engine does when its server is killed: the middle process is the server, the last one the engine."""
    write_plugin(tmp_path)
    last = (
        "import os, time, forge_vllm_plugin as p; p.die_with_parent(); print(os.getpid(), flush=True); time.sleep(60)"
    )
    middle = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {last!r}])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", middle], stdout=subprocess.PIPE, text=True, env=env)
    assert parent.stdout is not None
    orphan = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        if not lives(orphan):
            return
        time.sleep(0.1)
    os.kill(orphan, 9)
    pytest.fail("it outlived its parent by ten seconds")


def lives(pid: int) -> bool:
    """Not as a zombie that nobody asked about."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_served_folder_has_the_model_and_only_the_newest(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "model.safetensors", "optimizer.safetensors"):
            (tmp_path / name / file).write_text(name)
        folder = served_folder(tmp_path / name, tmp_path / "scratch")
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in folder.parent.iterdir()] == ["step-2"]
    with pytest.raises(EngineError, match="absent"):
        served_folder(tmp_path / "absent", tmp_path / "scratch")


def test_a_server_that_cannot_start_says_its_last_words(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "import sys; sys.exit('no memory for the KV cache')")
    server = Server(Launch(argv=argv, env={}, url="http://127.0.0.1:1"), tmp_path, tmp_path / "log")
    with pytest.raises(EngineError, match="no memory for the KV cache"):
        server.wait(60)


def test_a_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    argv = (sys.executable, "-c", "import time; time.sleep(60)")
    server = Server(Launch(argv=argv, env={}, url="http://127.0.0.1:1"), tmp_path, tmp_path / "log")
    with pytest.raises(EngineError, match=r"start_timeout_s = 0\.3"):
        server.wait(0.3)
    assert not server.lives


def test_no_environment_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="forge engine install vllm"):
        start(scenario(environment=str(tmp_path / "none")), 0, tmp_path, tmp_path / "scratch")


def test_half_an_environment_is_neither_used_nor_overwritten(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    there = found(tmp_path)
    assert there.version is None
    assert "vllm" in there.why
    with pytest.raises(ForgeError, match="--into"):
        install(tmp_path, gpu=False, say=print)
    assert found(tmp_path / "none").why.startswith("no environment")
