"""Kill a live run at random moments and resume it, until it is done; then look for items lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from forge import trace as ev
from forge.pool.reader import PoolReader
from forge.replay import replay
from forge.runs import RunFolder
from forge.types import ItemState

GROUP = 2
ITEMS = 60

SCENARIO = f"""
name = "chaos"
[stop]
items = {ITEMS}
[queue]
n = 6
batch = 2
concurrency = 4
group = {GROUP}
item_timeout_s = 20
[policy.scheduler]
kind = "windowed_fifo"
fraction = 0.5
park_items = 2
park_after_s = 0.3
park_reach = 3
[[domains]]
name = "calc"
tool_wait = {{ median_s = 0.05, sigma = 1.0, cap_s = 1 }}
[[domains]]
name = "chain"
tool_wait = {{ median_s = 0.05, sigma = 1.0, cap_s = 1 }}
[engine]
kind = "fake"
max_context = 256
"""


def start(*args: str) -> subprocess.Popen[bytes]:
    """`forge` in a process group of its own, so that one signal reaches the whole tree."""
    command = [sys.executable, "-m", "forge", *args]
    log = Path(args[-1]).parent / "chaos.log" if "--resume" in args else Path(args[1]).with_suffix(".log")
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def lives(folder: Path) -> int:
    """Lives that have begun to write their trace."""
    try:
        text = (folder / "trace.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    return text.count('"e":"run_started"') + text.count('"e":"resumed"')


def kill_at_random(process: subprocess.Popen[bytes], folder: Path, life: int, draw: random.Random) -> bool:
    """SIGKILL the tree somewhere in this life; False where it ended before."""
    if draw.random() < 0.2:  # while it starts, settles the pool, or loads the model
        time.sleep(draw.uniform(0.0, 5.0))
    else:
        while process.poll() is None and lives(folder) < life:
            time.sleep(0.02)
        time.sleep(draw.uniform(0.0, 1.5))
    if process.poll() is not None:
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def run_with_kills(root: Path, kills: int, seed: int) -> RunFolder:
    """A run killed `kills` times at random moments, resumed after each, then left to finish."""
    draw = random.Random(seed)
    scenario = root / "chaos.toml"
    scenario.write_text(SCENARIO)
    process = start("run", str(scenario), "--runs", str(root / "runs"), "--set", f"seed={seed}")
    latest = root / "runs" / "latest"
    while not latest.exists():
        time.sleep(0.05)
        assert process.poll() is None, "the run did not start"
    folder = RunFolder.open(latest.resolve())
    for _ in range(kills):
        if not kill_at_random(process, folder.path, lives(folder.path) + 1, draw):
            break
        process = start("run", "--resume", str(folder.path))
    assert process.wait(timeout=150) == 0
    return folder


def check_exactly_once(folder: RunFolder) -> None:
    """Every submitted item ended once, with all its trajectories, and the trace tells the same story."""
    with PoolReader(folder.path / "pool.sqlite") as pool:
        counts = pool.counts()
        assert sum(counts.values()) == ITEMS
        assert counts[ItemState.PUBLISHED] + counts[ItemState.DEAD] == ITEMS, counts
        published = pool.positions(ItemState.PUBLISHED)
        for position in published:
            members = [t.member for t in pool.trajectories(position)]
            assert members == list(range(GROUP)), f"item {position} has members {members}"
        steps = Counter(pool.item(position).step for position in published)
        assert sorted(steps) == list(range(1, len(steps) + 1)), "a step is missing or doubled"
    committed = [p for e in folder.events() if isinstance(e, ev.Committed) for p in e.positions]
    assert max(Counter(committed).values()) == 1, "an item was committed twice"
    assert set(committed) <= set(published)
    result = replay(folder)
    assert result.is_same, result.difference
