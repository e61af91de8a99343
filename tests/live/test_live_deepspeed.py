"""Live runs whose trainer spreads over two DeepSpeed ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from zero_support import gone, ranks_below, threads

from forge import trace as ev
from forge.pool.reader import PoolReader
from forge.replay import replay
from forge.runs import RunFolder
from forge.types import ItemState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        find_spec("deepspeed") is None, reason="DeepSpeed is missing: pip install 'forge-rl[deepspeed]'"
    ),
]

SETTINGS = [
    "queue={n=6,batch=2,concurrency=4,group=4,item_timeout_s=30}",
    'engine={kind="fake",max_context=512}',
    "eval.tasks=0",
    "train.engine=deepspeed",
]


def command(root: Path, *settings: str) -> list[str]:
    sets = [part for setting in (*SETTINGS, *settings) for part in ("--set", setting)]
    return [sys.executable, "-m", "forge", "run", "quickstart", "--runs", str(root), *sets]


@pytest.mark.parametrize("zero", [2, 3])
def test_a_short_run_trains(tmp_path: Path, zero: int) -> None:
    done = subprocess.run(
        command(tmp_path, "stop.steps=3", f"train.zero={zero}"), capture_output=True, text=True, env=threads()
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder.open((tmp_path / "latest").resolve())
    summary = folder.read("summary.json")
    assert summary is not None
    assert summary["steps"] >= 3
    assert summary["law_violations"] == []
    assert (folder.path / "deepspeed.log").is_file()
    assert replay(folder).is_same


def test_a_killed_rank_stops_the_run_and_a_resume_loses_nothing(tmp_path: Path) -> None:
    items = 24
    process = subprocess.Popen(
        command(tmp_path, f"stop={{items={items}}}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=threads(),
    )
    trace = tmp_path / "latest" / "trace.jsonl"
    while not (trace.is_file() and '"e":"committed"' in trace.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    ranks = ranks_below(process.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "DeepSpeed rank 1 was killed (SIGKILL)" in " ".join(output.split())
    assert "forge run --resume" in " ".join(output.split())
    assert gone(list(ranks.values()), 1.0)
    folder = RunFolder.open((tmp_path / "latest").resolve())
    resumed = subprocess.run(
        [sys.executable, "-m", "forge", "run", "--resume", str(folder.path)],
        capture_output=True,
        text=True,
        env=threads(),
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    with PoolReader(folder.path / "pool.sqlite") as pool:
        counts = pool.counts()
        assert counts[ItemState.PUBLISHED] + counts[ItemState.DEAD] == sum(counts.values()) == items
        published = pool.positions(ItemState.PUBLISHED)
        steps = Counter(pool.item(position).step for position in published)
        assert sorted(steps) == list(range(1, len(steps) + 1)), "a step is missing or doubled"
    committed = [p for e in folder.events() if isinstance(e, ev.Committed) for p in e.positions]
    assert max(Counter(committed).values()) == 1, "an item was committed twice"
    assert set(committed) <= set(published)
    assert replay(folder).is_same
