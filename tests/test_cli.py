"""User errors: one clear line each, exit code 2, never a traceback, nothing left behind."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from forge import scenario as scenarios
from forge import trace as ev
from forge.cli import main
from forge.runs import RunFolder

SMALL = [
    "--set",
    "stop={items=12}",
    "--set",
    "queue={n=4,batch=2,concurrency=2,group=2}",
]


def forge(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["forge", *args])
    return main()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["sim", "nowhere.toml"], "nowhere.toml: no such scenario file; scenarios that ship: campaign_m25, "),
        (["sim", "quickstart", "--set", "queue.nn=3"], "queue.nn: unknown key"),
        (["sim", "quickstart", "--set", "queue.n=many"], "queue.n = 'many'"),
        (["sim", "quickstart", "--set", "queue.n=4"], "concurrency = 24 must not exceed n = 4"),
        (["sim", "quickstart", "--set", "queue.batch=99"], "queue would deadlock"),
        (["sim", "quickstart", "--set", "policy.scheduler.fraction=1.5"], "fraction = 1.5: must lie in (0, 1]"),
        (["sim", "quickstart", "--set", "policy.scheduler.kind=magic"], "'strict_fifo', 'greedy', 'fffo'"),
        (["sim", "quickstart", "--set", "nonsense"], "write key.path=value"),
        (["sim", "quickstart", "--policy", "missing.toml"], "missing.toml: no such file"),
        (["tune", "quickstart", "--calibration", "missing.toml"], "missing.toml: no such file"),
        (["replay", "missing"], "missing: no such run"),
        (["report", "missing"], "missing: no such run"),
        (["calibrate", "missing"], "missing: no such run"),
        (["run"], "name a scenario, or --resume RUN"),
        (["run", "--resume", "missing"], "missing: no such run"),
        (["run", "quickstart", "--resume", "x"], "give no scenario"),
        (["run", "quickstart", "--set", "model.path=gpt-17"], "model.path = 'gpt-17': no such model; shipped:"),
        (
            ["run", "quickstart", "--set", 'domains=[{name="chess"}]'],
            "domain 'chess' is not known; known domains: calc",
        ),
        (["run", "quickstart", "--set", "engine.max_context=4096"], "engine.max_context = 4096: model 'quickstart'"),
        (["run", "quickstart", "--set", "queue.group=1"], "queue.group = 1"),
        (["serve", "gpt-17"], "model.path = 'gpt-17': no such model"),
        (["model", "get", "gpt-17"], "only smollm2"),
        (["nonsense"], "No such command"),
        (["sim", "x" * 300], "x: File name too long"),
        (["replay", "x" * 300], "scenario.resolved.json: File name too long"),
        (["replay", ""], "an empty name is no run"),
        (["run", "--resume", ""], "an empty name is no run"),
        (["sim", "quickstart", "--set", "queue.n=" + "[" * 3000], "--set queue.n: the value is nested too deeply"),
        (["sim", "quickstart", "--set", "queue.batch=99"], "error: quickstart: queue would deadlock"),
        (["sim", "quickstart", "--set", "queue.n=many"], "error: --set queue.n=many: queue.n = 'many'"),
        (["serve", "quickstart", "--max-context", "100000"], "--max-context = 100000: model 'quickstart'"),
        (["sim", "quickstart", "--set", "stop.seconds=inf"], "stop.seconds = inf: must be a finite number"),
        (["tune", "quickstart", "-o", "/dev/null/policy.toml"], "/dev/null/policy.toml: cannot be written"),
        (["tune", "quickstart", "-o", "/"], "/: cannot be written: it is a folder"),
        (["export", "missing", "--perfetto"], "missing: no such run"),
        (["export", "missing"], "nothing to export: give --perfetto, --parquet or both"),
        (["export", "missing", "--parquet", "-o", "x"], "--out x: is the file of --perfetto"),
        (["tune", "quickstart", "--seeds", "1"], "Invalid value for '--seeds'"),
        (["tune", "quickstart", "--param", "engine.instancs=1,2"], "--param: engine.instancs: not a key that can be"),
        (["tune", "quickstart", "--param", "engine.instances=2"], "nor choices; give a range such as 0.1..0.9"),
        (["tune", "quickstart", "--space", "missing.toml"], "missing.toml: no such file"),
        (["tune", "quickstart", "--set", "tune.queue.nn=3"], "quickstart: [tune]: queue.nn: not a key"),
        (["tune", "quickstart", "--set", "queue.lag_budget=3"], "queue.lag_budget = 3: no N in reach"),
    ],
)
def test_user_errors(
    args: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert forge(monkeypatch, *args) == 2
    captured = capsys.readouterr()
    assert complaint in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
    assert list(tmp_path.iterdir()) == [], "a refused command left something behind"


def test_a_file_that_is_no_toml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "s.toml"
    path.write_text("name = \n")
    assert forge(monkeypatch, "sim", str(path)) == 2
    assert "s.toml: not valid TOML" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe\x00")
    assert forge(monkeypatch, "sim", str(path)) == 2
    assert "s.toml: not a text file" in capsys.readouterr().err


def test_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = ["run", "quickstart", "--runs", str(tmp_path), "--set", f"live.port={port}"]
        assert forge(monkeypatch, *args) == 2
    assert f"port {port} on 127.0.0.1 is already in use" in capsys.readouterr().err


def test_sim_then_replay_then_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["--runs", str(tmp_path)]
    assert forge(monkeypatch, "sim", "quickstart", *SMALL, *runs, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["world"] == "sim"
    assert summary["samples_consumed"] > 0
    assert forge(monkeypatch, "replay", "latest", *runs) == 0
    assert capsys.readouterr().out.startswith("same: ")
    out = tmp_path / "missing" / "dir" / "x.toml"
    assert forge(monkeypatch, "calibrate", "latest", *runs, "-o", str(out)) == 0
    assert "step_s" in out.read_text()
    assert forge(monkeypatch, "calibrate", "latest", *runs, "-o", str(out / "x.toml")) == 2
    assert "cannot be written" in capsys.readouterr().err
    folder = (tmp_path / "latest").resolve()
    for name in ("scenario.resolved.json", "policy.toml", "trace.jsonl", "summary.json", "meta.json", "report.html"):
        assert (folder / name).stat().st_size > 0
    assert pq.read_metadata(folder / "items.parquet").num_rows == summary["items_submitted"]


def test_an_export_makes_again_what_a_run_made_and_a_timeline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    assert forge(monkeypatch, "sim", "quickstart", *SMALL, *runs) == 0
    folder = (tmp_path / "runs" / "latest").resolve()
    tables = [folder / "requests.parquet", folder / "items.parquet"]
    before = [path.read_bytes() for path in tables]
    for path in tables:
        path.unlink()
    capsys.readouterr()
    out = tmp_path / "new" / "t.json"
    assert forge(monkeypatch, "export", "latest", *runs, "--parquet", "--perfetto", "-o", str(out)) == 0
    assert capsys.readouterr().out.split() == [str(out), *map(str, tables)]
    assert [path.read_bytes() for path in tables] == before
    assert len(json.loads(out.read_text())["traceEvents"]) > 100
    assert forge(monkeypatch, "export", "latest", *runs, "--perfetto") == 0
    assert (folder / "trace.perfetto.json").read_bytes() == out.read_bytes()


def test_a_trace_without_its_end_is_said_to_be_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["--runs", str(tmp_path)]
    assert forge(monkeypatch, "sim", "quickstart", *SMALL, *runs) == 0
    trace = (tmp_path / "latest" / "trace.jsonl").resolve()
    assert forge(monkeypatch, "replay", "latest", *runs) == 0
    assert "no end" not in capsys.readouterr().out
    trace.write_text("".join(trace.read_text().splitlines(keepends=True)[:-1]))
    assert forge(monkeypatch, "replay", "latest", *runs) == 0
    assert "the trace has no end" in capsys.readouterr().out


def test_a_report_says_when_a_trace_breaks_the_laws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["--runs", str(tmp_path)]
    assert forge(monkeypatch, "sim", "quickstart", *SMALL, *runs) == 0
    assert forge(monkeypatch, "report", "latest", *runs) == 0
    assert "warning" not in capsys.readouterr().err
    trace = (tmp_path / "latest" / "trace.jsonl").resolve()
    lines = trace.read_text().splitlines(keepends=True)
    trace.write_text("".join(line for line in lines if '"e":"published"' not in line))
    assert forge(monkeypatch, "report", "latest", *runs) == 0
    assert "the queue's laws are broken" in capsys.readouterr().err
    assert forge(monkeypatch, "report", "latest", *runs, "-o", str(tmp_path / "out")) == 2
    assert "is for a comparison" in capsys.readouterr().err


def test_a_comparison_into_a_file_is_a_user_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["--runs", str(tmp_path / "runs")]
    for kind in ("greedy", "strict_fifo"):
        args = ("sim", "quickstart", *SMALL, *runs, "--set", f"policy.scheduler.kind={kind}")
        assert forge(monkeypatch, *args) == 0
    (tmp_path / "file").touch()
    folders = [str(p) for p in (tmp_path / "runs").iterdir() if not p.is_symlink()]
    assert forge(monkeypatch, "report", *folders, "-o", str(tmp_path / "file")) == 2
    assert "file: File exists" in capsys.readouterr().err


def test_faults_are_laid_to_the_file_that_has_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = tmp_path / "tuned.toml"
    policy.write_text('[scheduler]\nkind = "windowed_fifo"\nfractoin = 0.3\n\n[queue]\nn = "x"\n')
    assert forge(monkeypatch, "sim", "quickstart", "--policy", str(policy)) == 2
    errors = capsys.readouterr().err
    assert f"{policy}: policy.scheduler.fractoin: unknown key" in errors
    assert f"{policy}: queue.n = 'x'" in errors


def test_replay_finds_a_changed_decision(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    runs = ["--runs", str(tmp_path)]
    assert forge(monkeypatch, "sim", "quickstart", *SMALL, *runs) == 0
    trace = (tmp_path / "latest" / "trace.jsonl").resolve()
    lines = trace.read_text().splitlines()
    at = max(i for i, line in enumerate(lines) if '"slot":"scheduler"' in line)
    row = json.loads(lines[at])
    row["draw"] += 0.001
    lines[at] = json.dumps(row)
    trace.write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert forge(monkeypatch, "replay", "latest", *runs) == 1
    assert f"event {at + 1}: draw" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert forge(monkeypatch, "sim", "quickstart", *SMALL, "--runs", str(tmp_path / name)) == 0
    folders = [(tmp_path / name / "latest").resolve() for name in ("a", "b")]
    for file in ("trace.jsonl", "summary.json", "policy.toml", "scenario.resolved.json", "items.parquet"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file


def test_a_run_that_lost_its_pool_or_was_simulated_does_not_resume(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    folder = RunFolder.create(tmp_path, scenarios.load("quickstart"))
    for world, complaint in (("sim", "a simulated run; only live runs resume"), ("live", "pool.sqlite is gone")):
        event = ev.RunStarted(t=0.0, schema=ev.SCHEMA, world=world, scenario="quickstart", seed=0)
        folder.trace.write_text(ev.encode(event) + "\n")
        assert forge(monkeypatch, "run", "--resume", str(folder.path)) == 2
        assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("more", [[], ["--no-trace"]])
@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        (
            ["sim.instance_mtbf_s=1e-4", "sim.instance_repair_s=1e6"],
            "12 of timeout; sim.instance_mtbf_s = 0.0001 and sim.instance_repair_s = 1e+06: an instance is up 0.00%",
        ),
        (["queue.item_timeout_s=1e-3"], "12 of timeout; raise queue.item_timeout_s = 0.001"),
    ],
)
def test_a_run_that_trained_nothing_says_so_and_fails(
    sets: list[str],
    complaint: str,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    given = [arg for one in sets for arg in ("--set", one)]
    assert forge(monkeypatch, "sim", "quickstart", *SMALL, *given, *more, "--runs", str(tmp_path)) == 2
    captured = capsys.readouterr().err
    assert "error: nothing was trained: of 12 items none finished" in captured
    assert complaint in captured
    assert (tmp_path / "latest" / "report.html").is_file()


def test_agents_that_believe_in_more_context_than_the_engine_has_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    queue = "queue={n=2,batch=1,concurrency=1,group=2,item_timeout_s=20000}"
    args = ("sim", "campaign_m25", "--no-trace", "--runs", str(tmp_path), "--set", "stop.items=2", "--set", queue)
    assert forge(monkeypatch, *args) == 0
    assert "warning" not in capsys.readouterr().err
    assert forge(monkeypatch, *args, "--set", "engine.max_context=150000") == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    names = list(scenarios.load("campaign_m25").sim.agents)
    assert len(warned) == len(names) > 1
    for name, line in zip(names, warned, strict=True):
        assert f"sim.agents.{name}.context.limit_tokens = 200000: above engine.max_context = 150000" in line


@pytest.mark.parametrize("torn", ["", '{"t":0.0,"e":"run_st'])
@pytest.mark.parametrize(
    "command", [["replay"], ["report"], ["calibrate"], ["export", "--parquet"], ["export", "--perfetto"]]
)
def test_every_reader_of_a_trace_says_the_same_of_an_empty_one(
    command: list[str], torn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path / "runs", scenarios.load("quickstart"))
    before = sorted(folder.path.iterdir())
    assert forge(monkeypatch, *command, "latest") == 2
    assert f"error: {folder.path}/trace.jsonl: no trace here" in capsys.readouterr().err
    folder.trace.write_text(torn)
    assert forge(monkeypatch, *command, "latest") == 2
    assert f"error: {folder.path}/trace.jsonl: the trace is empty" in capsys.readouterr().err
    assert sorted(folder.path.iterdir()) == sorted([*before, folder.trace]), "something was left behind"


def test_tune_says_the_same_as_its_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    small = ("--set", "stop.items=40", "--set", "queue.group=2", "--seeds", "4", "--workers", "1", "--json")
    space = tmp_path / "space.toml"
    space.write_text("policy.scheduler.fraction = [0.1, 0.3]\n")
    assert forge(monkeypatch, "tune", "quickstart", "-o", str(policy), "--space", str(space), *small) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == json.loads((tmp_path / "tune.json").read_text())
    assert len(told["candidates"]) == 2
    assert told["held_out"]["seeds"] == [2, 3]
    assert forge(monkeypatch, "sim", "quickstart", "--policy", str(policy), *SMALL, "--runs", str(tmp_path)) == 0
