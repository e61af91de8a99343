"""What a killed process left half written goes when the same file is next written; nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_metrics import story

from forge.report.perfetto import write_perfetto
from forge.runs import write_text
from forge.tables import write_tables
from forge.temporary import temporary_for

KILLED = """
import os, signal, sys
from pathlib import Path
from forge.temporary import temporary_for
temporary_for(Path(sys.argv[1])).write_text("half")
os.kill(os.getpid(), signal.SIGKILL)
"""

WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    ("t.json", lambda path: write_perfetto(story(), path)),
    ("items.parquet", lambda path: write_tables(story(), path.parent)),
    ("notes.txt", lambda path: write_text(path, "whole")),
]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
def test_the_next_write_clears_what_a_kill_left(name: str, write: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / name
    subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f".{name}.")
    write(path)
    assert path.stat().st_size > 0
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_only_its_own_kind_is_cleared(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = tmp_path / "a.json"
    others = [
        tmp_path / name
        for name in (f".b.json.{dead.pid}.tmp", f".a.json.{os.getppid()}.tmp", ".a.json.tmp", ".a.json.x.tmp", "a.tmp")
    ]
    for path in others:
        path.touch()
    (tmp_path / f".a.json.{dead.pid}.tmp").touch()
    assert temporary_for(mine) == tmp_path / f".a.json.{os.getpid()}.tmp"
    assert sorted(tmp_path.iterdir()) == sorted(others)
