"""A checkpoint is whole or does not count: killed writers, torn files, pruning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forge.train.checkpoint import MANIFEST, CheckpointError, Position, companions, latest, read, write

REPOSITORY = Path(__file__).parents[2]


def save(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights" * 50)
    (folder / "config.json").write_text("{}")


def commit(root: Path, step: int, *, keep: int = 3, version: int | None = None) -> Path:
    position = Position(step=step, version=step if version is None else version, positions=(2 * step, 2 * step + 1))
    return write(root, position, save, keep=keep)


def steps(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    position = Position(step=12, version=5, positions=(3, 1, 4), state={"head": 7, "by_domain": {2: (1, 2)}})
    folder = write(tmp_path / "new" / "root", position, save)
    assert folder.name == "step-000012"
    found = read(folder)
    assert (found.step, found.version, found.positions) == (12, 5, (3, 1, 4))
    assert found.state == {"head": 7, "by_domain": {"2": [1, 2]}}  # JSON has no tuples and no integer keys
    assert latest(tmp_path / "new" / "root") == folder


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None


def test_only_the_last_k_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        commit(tmp_path, step, keep=2)
    assert steps(tmp_path) == ["step-000004", "step-000005"]
    with pytest.raises(ValueError, match="keep = 0"):
        commit(tmp_path, 6, keep=0)


def test_latest_is_by_number_not_by_name(tmp_path: Path) -> None:
    commit(tmp_path, 999_999)
    folder = commit(tmp_path, 1_000_000)
    assert latest(tmp_path) == folder


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)


def lose(folder: Path) -> None:
    (folder / "config.json").unlink()


def tear_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text()[:40])


def edit_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"positions": [0]}))


def other_schema(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))


def not_an_object(folder: Path) -> None:
    (folder / MANIFEST).write_text("[]")


def lose_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


@pytest.mark.parametrize(
    "damage",
    [truncate, flip, lose, tear_manifest, edit_manifest, other_schema, not_an_object, lose_manifest],
    ids=lambda f: f.__name__,
)
def test_a_damaged_checkpoint_does_not_count(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    good, bad = commit(tmp_path, 1), commit(tmp_path, 2)
    damage(bad)
    with pytest.raises(CheckpointError, match="step-000002"):
        read(bad)
    assert latest(tmp_path) == good
    again = commit(tmp_path, 2)
    assert latest(tmp_path) == again


def test_steps_of_an_abandoned_branch_go(tmp_path: Path) -> None:
    """Resumed from step 1 although 2 and 3 exist: what is trained from here on must be what a resume finds."""
    for step in (1, 2, 3):
        commit(tmp_path, step)
    commit(tmp_path, 2, version=77)
    assert steps(tmp_path) == ["step-000001", "step-000002"]
    newest = latest(tmp_path)
    assert newest is not None
    assert read(newest).version == 77


# Commits step argv[2], but dies without any clean-up at the argv[3]-th call that touches the disk. A dying rmtree has
# removed one file already; a dying write_text has written half of one. Imports no site-packages: it starts in no time.
KILLED_WRITER = """
import os, shutil, sys
from pathlib import Path
from forge.train import checkpoint
root, step, fatal = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
calls = 0
def dying(function, half):
    def wrapped(*args, **options):
        global calls
        calls += 1
        if calls == fatal:
            half(*args)
            os._exit(9)
        return function(*args, **options)
    return wrapped
nothing = lambda *args: None
os.fsync = dying(os.fsync, nothing)
os.rename = dying(os.rename, nothing)
shutil.rmtree = dying(shutil.rmtree, lambda path: next(iter(path.iterdir())).unlink())
write_text = Path.write_text
Path.write_text = dying(write_text, lambda path, text: write_text(path, text[: len(text) // 2]))
def save(folder):
    (folder / "model.safetensors").write_bytes(b"new" * 50)
    (folder / "config.json").write_text('{"new": true}')
position = checkpoint.Position(step=step, version=100 + step, positions=(step,))
checkpoint.write(root, position, save, keep=2)
"""


@pytest.mark.parametrize(("step", "allowed"), [(4, {3, 104}), (3, {2, 3, 103})], ids=["next step", "same step again"])
def test_a_writer_killed_at_any_point_leaves_a_committed_state(tmp_path: Path, step: int, allowed: set[int]) -> None:
    survived = set()
    for fatal in range(1, 50):
        root = tmp_path / str(fatal)
        for before in (1, 2, 3):
            commit(root, before, keep=3)
        command = [sys.executable, "-S", "-c", KILLED_WRITER, str(root), str(step), str(fatal)]
        result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        newest = latest(root)
        assert newest is not None
        survived.add(read(newest).version)
        if result.returncode == 0:
            break
        assert result.returncode == 9, result.stderr
        # The next writer is not in the way of what the dead one left behind.
        assert latest(root) == newest
        assert commit(root, step) == latest(root)
        assert not [name for name in steps(root) if name.startswith(".partial-")]
    else:
        pytest.fail("the writer never got through")
    assert fatal > 8
    assert survived == allowed


def test_companions(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    wanted = {"config.json", "tokenizer.json", "chat_template.jinja", "merges.txt", "tokenizer.model", "modeling.py"}
    others = {
        "model.safetensors",
        "pytorch_model.bin",
        "model.safetensors.index.json",
        MANIFEST,
        "optimizer.safetensors",
    }
    for name in wanted | others:
        (tmp_path / name).write_text(name)
    assert companions(tmp_path) == {name: name.encode() for name in wanted}
