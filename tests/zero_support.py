"""Batches, processes and distances for the tests of the train engine over ranks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from forge.types import TrainSample


def longer(samples: list[TrainSample], times: int) -> list[TrainSample]:
    """Each sample's tokens repeated: long enough to be streamed under a small budget."""
    return [
        dataclasses.replace(
            sample,
            token_ids=sample.token_ids * times,
            loss=(False,) * (len(sample.loss) * (times - 1)) + sample.loss,
            logprobs=(0.0,) * (len(sample.loss) * (times - 1)) + sample.logprobs,
            advantages=(0.0,) * (len(sample.loss) * (times - 1)) + sample.advantages,
        )
        for sample in samples
    ]


def distance(one: Path, other: Path, file: str = "model.safetensors") -> float:
    """The largest ||a - b|| / ||b|| over the tensors of two checkpoints, which have the same names."""
    a, b = load_file(one / file), load_file(other / file)
    assert a.keys() == b.keys()
    return max(float((a[k].double() - b[k].double()).norm() / b[k].double().norm().clamp_min(1e-30)) for k in b)


def moved(one: Path, other: Path) -> float:
    """How far apart the weights of two checkpoints are as a whole, relative to the second."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    gap = torch.stack([(a[k] - b[k]).double().norm() for k in b]).norm()
    return float(gap / torch.stack([b[k].double().norm() for k in b]).norm())


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run; zombies do not."""
    shown = subprocess.run(["ps", "-o", "pid=,stat=", "-p", ",".join(map(str, pids))], capture_output=True, text=True)
    rows = [line.split() for line in shown.stdout.splitlines()]
    return [int(pid) for pid, state, *_ in rows if not state.startswith("Z")]


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not alive(pids):
            return True
        time.sleep(0.05)
    return False


def ranks_below(pid: int) -> dict[int, int]:
    """Process ids by rank of the DeepSpeed ranks that descend from a process."""
    shown = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in shown.stdout.splitlines()]
    parents = {int(row[0]): int(row[1]) for row in rows}
    found = {}
    for row in rows:
        above = int(row[0])
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and "forge.train.zero.rank" in row[2] and "launch" not in row[2]:
            environment = Path(f"/proc/{row[0]}/environ").read_bytes().split(b"\0")
            ranks = [int(entry[5:]) for entry in environment if entry.startswith(b"RANK=")]
            if ranks:
                found[ranks[0]] = int(row[0])
    return found


def threads() -> dict[str, str]:
    """The environment for processes started by a test on a small machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}
