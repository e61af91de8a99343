"""Recipes: those that ship are sound, and what is wrong with one is said with its path."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from forge.blackbox import install as installing
from forge.blackbox import recipe as recipes
from forge.blackbox.catalog import PROGRAMS
from forge.blackbox.install import named
from forge.blackbox.recipe import fill, folders_of, load, shipped
from forge.cli import main
from forge.types import ForgeError

VALUES = {"task": "do $this", "task_json": '{"prompt": "x"}', "trajectory": "1.2.0", "key": "k", "model": "m"}


@pytest.mark.parametrize("name", shipped())
def test_those_that_ship_are_sound(name: str) -> None:
    one = load(name)
    filled = fill(one, VALUES)
    assert one.program in PROGRAMS
    texts = [*filled.command, *filled.environment.values(), *filled.home.values()]
    assert any("do $this" in text or '{"prompt"' in text for text in texts), "it is told its task"
    assert any("http://127.0.0.1:8000/t/1.2.0" in text for text in texts), "it is told where its model is"
    for path, text in filled.home.items():
        json.loads(text) if path.endswith(".json") else tomllib.loads(text)
    assert one.exit.scored == (0,)
    for part in filled.command:
        if part.startswith(str(recipes.drivers())):
            assert Path(part).is_file()


def test_every_program_has_a_recipe() -> None:
    assert {load(name).program for name in shipped()} == set(PROGRAMS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "command: missing; add it"),
        ("command = []", "command = []: must have 1 or more elements"),
        ('command = ["x"]\nkomand = 1', "komand: unknown key"),
        ('command = ["x"]\n[limits]\nminutes = 1', "limits.minutes: unknown key"),
        ('command = ["x"]\n[limits]\nseconds = -1', "limits.seconds = -1: must be greater than 0"),
        ('command = ["x", "$nothing"]', "command.1: $nothing is not known; there are base_url, drivers,"),
        ('command = ["x"]\n[environment]\nA = "5 $"', "environment.A: a lone $; write $$"),
        ('command = ["$program/x"]', "$program is used; say which in program"),
        ('command = ["x"]\n[home]\n"../x" = ""', "not a path within the folder"),
        ('command = ["x"]\n[workspace]\n"/x" = ""', "not a path within the folder"),
        ('command = ["x"]\n[exit]\nscored = [256]', "exit.scored.0 = 256: must be less than or equal to 255"),
    ],
)
def test_what_is_wrong_is_said_with_its_path(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ForgeError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert says in str(raised.value)


def test_a_program_of_ones_own_has_its_folder_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    path = tmp_path / "mine.toml"
    path.write_text('command = ["$home/x", "$$HOME"]\nfolders = ["code"]\nbase_url = "$gateway/t/$trajectory"\n')
    one = load(path)
    assert folders_of(one) == (tmp_path / "code",)
    assert fill(one, VALUES).command == ("/home/agent/x", "$HOME")
    (tmp_path / "code").rmdir()
    with pytest.raises(ForgeError, match="no such folder, and the recipe needs it"):
        folders_of(one)


def test_what_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForgeError, match=r"nothing: no such recipe; recipes that ship: aider, "):
        load("nothing")
    monkeypatch.setattr(recipes, "ENGINES", tmp_path)
    with pytest.raises(ForgeError, match="codex: not installed; forge blackbox install codex"):
        folders_of(load("codex"))
    with pytest.raises(ForgeError, match="emacs: no program known by that name; there are opencode, "):
        named(["emacs"])


def test_an_install_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing, "PATH", str(tmp_path))
    for name in ("sdks", "codex"):
        with pytest.raises(ForgeError, match=r"(python3|npm): not installed under .*; apt-get install"):
            installing.install(tmp_path / name, name, PROGRAMS[name], print)
    assert list(tmp_path.iterdir()) == []


def test_the_list_says_what_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "codex" / "node_modules" / ".bin").mkdir(parents=True)
    (tmp_path / "codex" / "node_modules" / ".bin" / "codex").touch()
    monkeypatch.setattr(recipes, "ENGINES", tmp_path)
    monkeypatch.setattr("sys.argv", ["forge", "blackbox", "list", "--json"])
    assert main() == 0
    rows = {row["program"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name for name, row in rows.items() if row["installed"]} == {"codex"}
    assert rows["opencode"]["recipes"] == ["opencode", "opencode-messages", "opencode-responses"]
