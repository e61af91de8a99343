"""`forge eval` on the shipped model: what it prints, what it leaves, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from forge.live.scoring import Asked, scenario_of, subject
from forge.pool.reader import PoolReader
from forge.runs import RunFolder
from forge.types import ForgeError

PLAIN, WINDOW = "plain/native/all/bare", "plain/hermes~bare/window-2/bare"


@pytest.mark.timeout(120)
def test_tasks_are_scored_in_every_scaffold(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "forge", "eval", "quickstart", "--runs", str(tmp_path), "--json"]
    options = ["--tasks", "12", "--domains", "calc,gcd", "--scaffolds", f"{PLAIN},{WINDOW}"]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["scaffold"] for row in result["scaffolds"]] == [PLAIN, WINDOW]
    assert [len(of) for of in result["scores"].values()] == [12, 12]
    assert set(result["domains"].values()) == {"calc", "gcd"}
    assert result["spread"]["sd"] >= 0.0
    folder = RunFolder.open(result["folder"])
    assert folder.read("scores.json") == {key: value for key, value in result.items() if key != "folder"}
    assert (folder.path / "scores.png").stat().st_size > 5000
    assert not (tmp_path / "latest").exists()
    with PoolReader(folder.path / "pool.sqlite") as pool:
        kept = [one for position in range(24) for one in pool.trajectories(position)]
    assert sorted(one.outcome.scaffold for one in kept) == sorted([PLAIN, WINDOW] * 12)


def test_what_is_neither_a_run_nor_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="neither a run nor a model"):
        subject("nothing", tmp_path)


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    about = subject("quickstart", tmp_path)
    folder = RunFolder.create(tmp_path, scenario_of(about, Asked(scaffolds=[PLAIN], tasks=2)))
    with pytest.raises(ForgeError, match="without a checkpoint"):
        subject(str(folder.path), tmp_path)


@pytest.mark.parametrize(
    ("over", "why"),
    [
        ({"domains": ["chess"]}, "domain 'chess' is not known"),
        ({"max_context": 100_000}, "--max-context = 100000"),
        ({"scaffolds": ["plain"]}, "scaffold 'plain'"),
    ],
)
def test_what_cannot_be_asked_is_refused(tmp_path: Path, over: dict[str, object], why: str) -> None:
    asked = Asked(**({"scaffolds": [PLAIN], "tasks": 2} | over))  # type: ignore[arg-type]
    with pytest.raises(ForgeError, match=why):
        scenario_of(subject("quickstart", tmp_path), asked)
