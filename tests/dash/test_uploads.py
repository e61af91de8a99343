"""What is uploaded or chosen: a broken one is one clear sentence, and the newest run comes first."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import worlds

from dashboards import uploads
from dashboards.uploads import kept, listed, runs_in, scenario_from, scenario_of_trace, state_of
from forge import trace as ev
from forge.pool.store import Pool
from forge.runs import RunFolder
from forge.scenario import load, resolved
from forge.types import ForgeError


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "up.toml: not a text file"),
        (b"name = ", "up.toml: not valid TOML"),
        (b"", "up.toml: name: missing; add it"),
        (b"a = " + b"[" * 5000, "up.toml: nested too deeply"),
        (
            b'name = "x"\nstop = {items = 4}\ndomains = [{name = "a"}]\nqueue = {nn = 3}',
            "up.toml: queue.nn: unknown key",
        ),
        (b'name = "x"\nstop = {items = -4}\ndomains = [{name = "a"}]', "up.toml: stop.items = -4"),
        (b'name = "x"\nstop = {seconds = inf}\ndomains = [{name = "a"}]', "up.toml: stop.seconds = inf"),
    ],
)
def test_a_broken_scenario_is_a_sentence(data: bytes, complaint: str) -> None:
    with pytest.raises(ForgeError) as raised:
        scenario_from(data, "up.toml")
    assert str(raised.value).startswith(complaint)


def test_a_scenario_is_read_as_from_its_file() -> None:
    data = (Path("scenarios") / "quickstart.toml").read_bytes()
    assert scenario_from(data, "mine.toml") == load("quickstart")
    text = json.dumps(resolved(load("quickstart"))).encode()
    assert uploads.resolved_scenario(text, "scenario.resolved.json") == load("quickstart")
    with pytest.raises(ForgeError, match=r"^my\.json: not valid JSON"):
        uploads.resolved_scenario(b"{", "my.json")


def test_every_scenario_that_ships_says_its_question() -> None:
    assert uploads.shipped()[0] == "quickstart"
    assert all(uploads.opening(name).endswith("?") for name in uploads.shipped())


def test_an_upload_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = kept(b"abc", "../../etc/trace.jsonl")
    assert path.name == "trace.jsonl"
    assert path.is_relative_to(tmp_path)
    assert kept(b"abc", "trace.jsonl") == path
    assert kept(b"abd", "trace.jsonl") != path


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "t.jsonl: the trace is empty"),
        (b"\xff\xfe\x00binary\n", "t.jsonl:1: not a trace event"),
        (b'{"t":0.0,"e":"published","version":1,"step":1,"items":1}\n', "t.jsonl:1: a trace of schema 2 begins with"),
        (
            b'{"t":0.0,"e":"run_started","schema":2,"world":"sim","scenario":"mine","seed":0}\n',
            "t.jsonl: a trace of the scenario 'mine', which does not ship; upload its",
        ),
    ],
)
def test_a_broken_trace_is_a_sentence(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "stored.jsonl"
    path.write_bytes(data)
    with pytest.raises(ForgeError) as raised:
        scenario_of_trace(path, "t.jsonl")
    assert str(raised.value).startswith(complaint)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", worlds.scenario(), ["forge"])
    writer = ev.TraceWriter(folder.trace)
    worlds.World(worlds.scenario(), sinks=(writer,)).run()
    writer.close()
    return folder


@pytest.mark.skipif(not uploads.LOCKS.is_file(), reason="only Linux tells who holds a lock")
def test_a_run_whose_process_works_is_live_from_its_first_moment(run: RunFolder) -> None:
    """It evaluates its starting model for minutes before its first event, and may stand still for longer than that."""
    begun = RunFolder.create(run.path.parent, worlds.scenario(), ["forge"])
    with Pool(begun.path / "pool.sqlite"):
        assert state_of(begun.trace) == "begins"
        begun.trace.write_bytes(run.trace.read_bytes()[:2000].rpartition(b"\n")[0] + b"\n")
        past = time.time() - 100
        os.utime(begun.trace, (past, past))
        assert state_of(begun.trace) == "live"
    assert state_of(begun.trace) == "stopped"


def test_runs_are_listed_with_what_became_of_them(run: RunFolder) -> None:
    root = run.path.parent
    whole = run.trace.read_bytes()
    assert state_of(run.trace) == "ended"
    run.trace.write_bytes(whole[: len(whole) // 2])
    assert state_of(run.trace) == "live", "it has no end, and was written a moment ago"
    past = time.time() - 100
    os.utime(run.trace, (past, past))
    assert state_of(run.trace) == "stopped"
    newer = RunFolder.create(root, worlds.scenario(), ["forge"])
    found = runs_in(root)
    assert [(one.name, one.state) for one in found] == [(newer.path.name, "no trace"), (run.path.name, "stopped")]
    assert found[0].label().endswith("figures only")
    assert listed(run.path, root).path == run.path
    assert runs_in(root / "nowhere") == []
