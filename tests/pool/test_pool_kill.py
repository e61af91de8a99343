"""kill -9 for real: a process that runs the whole path dies at seeded moments and is resumed until all is done."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

from pool_life import SHAPE
from pool_support import MEMBERS, trajectory

from forge import trace as ev
from forge.metrics import LawCheck
from forge.pool.reader import PoolReader
from forge.train import checkpoint
from forge.types import ItemState
from forge.views import Views

ITEMS = 120
KILLS = 6


def live(folder: Path, seed: int, rollouts: int | None, wait_s: float = 0.0) -> None:
    """One life, killed `wait_s` after it began so many rollouts; None lets it come to its end."""
    command = [sys.executable, str(Path(__file__).with_name("pool_life.py")), str(folder), str(ITEMS), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if rollouts is None:
            assert process.stdout.readlines()[-1] == "done\n"
            return
        for _ in range(rollouts):
            assert process.stdout.readline()
        time.sleep(wait_s)
        process.kill()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"


def test_every_item_ends_exactly_once(tmp_path: Path) -> None:
    rng = Random(0)
    for life in range(KILLS):
        live(tmp_path, life, rng.randrange(1, 16), rng.random() * 0.01)
    live(tmp_path, KILLS, None)
    with PoolReader(tmp_path / "pool.sqlite") as pool:
        counts = pool.counts()
        assert counts[ItemState.DEAD] + counts[ItemState.PUBLISHED] == ITEMS
        newest = checkpoint.latest(tmp_path / "checkpoints")
        assert newest is not None
        trained = json.loads((newest / "model.json").read_text())
        assert trained == pool.queue_state()["committed"]  # what the weights saw is what the pool says, in its order
        assert sorted(trained) == pool.positions(ItemState.PUBLISHED)
        for position in trained:
            attempt = pool.item(position).attempt
            assert pool.trajectories(position) == [trajectory(position, m, attempt) for m in range(MEMBERS)]
        views = Views(SHAPE, 1)
        for event in ev.read(tmp_path / "trace.jsonl"):
            views.apply(event)
        assert views.queue.to_dict() == pool.queue_state()
    events = list(ev.read(tmp_path / "trace.jsonl"))
    assert [e for e in events if isinstance(e, ev.Resumed) and e.queue["parked"]], "a life began with items parked"
    laws = LawCheck(SHAPE, SHAPE.n, 1)
    for event in events:
        laws.apply(event)
    assert not [broken for broken in laws.violations if "still served" not in broken]
