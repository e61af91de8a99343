"""A live run whose rollouts are a program's: the seam between the launcher and the run around it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

pytest.importorskip("torch")

from forge import trace as ev
from forge.cli import main
from forge.pool.reader import PoolReader
from forge.replay import replay
from forge.runs import RunFolder
from forge.sandbox.holder import PROGRAMS as NEEDED

AGENT = (Path(__file__).parent / "fake_agent.py").read_text(encoding="utf-8").replace("$", "$$")


def written(folder: Path, mode: str) -> Path:
    path = folder / f"{mode}.toml"
    recipe = {
        "command": ["python3", "$home/agent.py", mode],
        "environment": {"BASE_URL": "$base_url"},
        "home": {"agent.py": AGENT, "task.json": "$task_json"},
        "answer": ".answer",
    }
    path.write_text(tomli_w.dumps(recipe), encoding="utf-8")
    return path


def command(root: Path, recipe: Path, *settings: str) -> list[str]:
    sets = [
        f'domains=[{{name="calc",agent="{recipe}"}}]',
        "queue={n=4,batch=2,concurrency=2,group=2,item_timeout_s=30}",
        "stop={items=4}",
        *settings,
    ]
    return ["forge", "run", "quickstart", "--runs", str(root), *(part for one in sets for part in ("--set", one))]


@pytest.mark.skipif(any(shutil.which(name) is None for name in NEEDED), reason="needs bubblewrap")
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_trains_on_what_a_program_did(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command(tmp_path, written(tmp_path, "work"), "eval.tasks=2")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    folder = RunFolder.open((tmp_path / "latest").resolve())
    summary = folder.read("summary.json") or {}
    assert summary["samples_consumed"] > 0
    assert summary["law_violations"] == []
    ends = [event for event in folder.events() if isinstance(event, ev.MemberDone)]
    assert len(ends) == 8
    assert Counter(event.reason for event in ends) == {None: 8}
    assert all(event.turns > 0 for event in ends), "the gateway counts for it"
    with PoolReader(folder.path / "pool.sqlite") as pool:
        (one, _) = pool.trajectories(0)
    assert one.outcome.turns == len(one.completions)
    assert {c.fork for c in one.completions} == {"root", None} or len(one.completions) == 1
    assert len((folder.read("evaluation.json") or {})["end"]["scores"]) == 2
    assert replay(folder).is_same


def test_a_recipe_that_is_wrong_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('command = ["x"]\nfolders = ["gone"]\n', encoding="utf-8")
    for recipe, says in ((path, "gone: no such folder, and the recipe needs it"), (tmp_path / "x", "no such recipe")):
        monkeypatch.setattr("sys.argv", command(tmp_path, recipe))
        assert main() == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "latest").exists()
