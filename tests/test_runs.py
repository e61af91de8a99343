"""Run folders: made, found, read back, and never half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import World, scenario

from forge.metrics import summarise
from forge.runs import FILES, RunFolder, read_json, write_json
from forge.scenario import load
from forge.trace import TraceWriter
from forge.types import ForgeError


def test_a_new_folder_holds_what_is_known_and_reads_back(tmp_path: Path) -> None:
    given = scenario(policy={"router": {"kind": "round_robin"}})
    folder = RunFolder.create(tmp_path / "runs", given, command=["/usr/bin/forge", "run", "tiny"])
    assert folder.scenario() == given
    assert folder.command() == "forge run tiny"
    assert folder.path.name.endswith("-tiny")
    assert {p.name for p in folder.path.iterdir()} == {
        "README.txt",
        "scenario.resolved.json",
        "policy.toml",
        "meta.json",
    }
    meta = folder.read("meta.json")
    assert meta is not None
    assert meta["lives"][0]["elapsed_s"] is None
    folder.end_life()
    folder.begin_life(["forge", "run", "--resume"])
    lives = (folder.read("meta.json") or {})["lives"]
    assert lives[0]["elapsed_s"] >= 0
    assert lives[1]["command"] == ["forge", "run", "--resume"]


def test_state_a_policy_gathered_while_it_ran_stays_out_of_the_files(tmp_path: Path) -> None:
    given = scenario(policy={"router": {"kind": "round_robin"}})
    given.policy.router._calls = 7  # type: ignore[union-attr]
    folder = RunFolder.create(tmp_path, given)
    assert '"_calls"' not in (folder.path / "scenario.resolved.json").read_text()
    assert folder.scenario().policy.router._calls == 0  # type: ignore[union-attr]


def test_the_policy_file_deploys(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, scenario(policy={"scheduler": {"kind": "greedy"}}))
    other = tmp_path / "other.toml"
    other.write_text('name = "x"\nstop = { items = 1 }\ndomains = [{ name = "a" }]\n')
    deployed = load(other, policy=folder.path / "policy.toml")
    assert deployed.policy.scheduler.kind == "greedy"
    assert (deployed.queue.n, deployed.queue.concurrency) == (8, 6)


def test_runs_that_start_in_one_second_get_folders_of_their_own_and_latest_is_the_last(tmp_path: Path) -> None:
    made = [RunFolder.create(tmp_path, scenario()) for _ in range(5)]
    assert len({f.path for f in made}) == 5
    assert RunFolder.open("latest", tmp_path) == RunFolder.open(tmp_path / "latest")
    assert RunFolder.open("latest", tmp_path).path == made[-1].path.resolve()
    assert RunFolder.open(made[0].path.name, tmp_path).path == made[0].path.resolve()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(("name", "slug"), [("a b/c", "a-b-c"), ("../up", "up"), ("ü", "run")])
def test_names_are_made_safe(tmp_path: Path, name: str, slug: str) -> None:
    folder = RunFolder.create(tmp_path, scenario(name=name))
    assert folder.path.parent == tmp_path
    assert folder.path.name.split("-", 2)[2] == slug


def test_what_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ForgeError, match="no such run"):
        RunFolder.open("latest", tmp_path)
    with pytest.raises(ForgeError, match="not a run folder"):
        RunFolder.open(tmp_path)
    (tmp_path / "scenario.resolved.json").write_text("[1]")
    with pytest.raises(ForgeError, match="not a JSON object"):
        RunFolder.open(tmp_path).scenario()
    (tmp_path / "file").write_text("")
    with pytest.raises(ForgeError, match="cannot make a run folder"):
        RunFolder.create(tmp_path / "file", scenario())
    blocked = tmp_path / "blocked"
    (blocked / "latest" / "inside").mkdir(parents=True)
    with pytest.raises(ForgeError, match="in the way"):
        RunFolder.create(blocked, scenario())


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]
    assert read_json(tmp_path / "none.json") is None
    path.write_text("{")
    with pytest.raises(ForgeError, match="not valid JSON"):
        read_json(path)


def test_all_but_meta_is_the_same_to_the_byte(tmp_path: Path) -> None:
    given = scenario()
    made = []
    for name in ("a", "b"):
        folder = RunFolder.create(tmp_path / name, given, command=["forge"])
        writer = TraceWriter(folder.trace)
        World(given, sinks=(writer,)).run()
        writer.close()
        folder.write("summary.json", summarise(folder.events(), given))
        made.append({p.name: p.read_bytes() for p in folder.path.iterdir() if p.name != "meta.json"})
    assert made[0] == made[1]
    assert json.loads(made[0]["summary.json"])["law_violations"] == []


def test_the_readme_has_a_line_for_every_file(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, scenario())
    text = (folder.path / "README.txt").read_text()
    assert all(f"{name} " in text for name in FILES)
