"""Durable checkpoints: a folder is either whole and on disk, or it does not count.

`step-000012/` is written under a temporary name, each file fsynced and hashed, then renamed; the rename is the commit
(DESIGN section 2, "Commit and publish"). `position.json` is written last and lists every other file with its SHA-256,
so a torn, truncated or half-deleted folder is recognised. One writer per folder; readers need no lock.
Imports neither torch nor numpy: what goes into the folder is the caller's `save`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from forge.types import ForgeError, Json

SCHEMA = 1
MANIFEST = "position.json"
_STEP = re.compile(r"step-\d{6,}")
_TEMPORARY = ".partial-"


class CheckpointError(ForgeError):
    """A checkpoint folder that is incomplete, corrupt or of another schema; the message says which file and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where training stands. `positions` are the queue items trained in this very step, `version` the weights version
    a publication of this checkpoint would carry. `state` is whatever the caller must commit in the same instant."""

    step: int
    version: int
    positions: tuple[int, ...]
    state: Json = field(default_factory=dict)


def write(root: Path, position: Position, save: Callable[[Path], None], *, keep: int = 3) -> Path:
    """Commit one checkpoint and return its folder; `save(folder)` writes flat files (no subfolders) into it.

    Afterwards only the newest `keep` steps remain, and none later than this one. Keep at least 2 where engines may
    still be reading the last one.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least the checkpoint just written must stay")
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(leftover)  # of a writer that was killed
    final = root / f"step-{position.step:06d}"
    temporary = root / f"{_TEMPORARY}{final.name}"
    temporary.mkdir()
    save(temporary)
    files = {path.name: _hash(path) for path in sorted(temporary.iterdir())}
    (temporary / MANIFEST).write_text(json.dumps(_manifest(position, files), indent=1))
    for path in (*temporary.iterdir(), temporary):
        _sync(path)
    # Steps from here on belong to a branch abandoned by a resume: they go first, newest first, so that a crash at any
    # point leaves a state that was once committed.
    for abandoned in reversed([folder for folder in _steps(root) if _number(folder) >= position.step]):
        os.rename(abandoned, root / f"{_TEMPORARY}old-{abandoned.name}")
    os.rename(temporary, final)
    _sync(root)
    _prune(root, keep)
    return final


class Checkpointed(ABC):
    """What commits checkpoints of itself. `steps`: trainer steps taken."""

    steps: int

    @abstractmethod
    def _save_files(self, folder: Path) -> None:
        """All of it, as flat files."""

    def save(
        self,
        root: Path,
        *,
        version: int,
        positions: Sequence[int],
        keep: int = 3,
        state: Json | None = None,
        step: int | None = None,
    ) -> Path:
        """As `forge.train.protocol.Trainer.save`."""
        number = self.steps if step is None else step
        position = Position(step=number, version=version, positions=tuple(positions), state=state or {})
        return write(root, position, self._save_files, keep=keep)


def latest(root: Path) -> Path | None:
    """The whole and intact checkpoint with the highest step, or None. Reads and hashes its files."""
    for folder in reversed(_steps(root)):
        try:
            read(folder)
        except CheckpointError:
            continue
        return folder
    return None


def read(folder: Path) -> Position:
    """Verify every file of a checkpoint against its manifest and return its position."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        position = Position(
            step=manifest["step"],
            version=manifest["version"],
            positions=tuple(manifest["positions"]),
            state=manifest["state"],
        )
        expected = _manifest(position, manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read: {error!r}") from error
    if manifest != expected:
        raise CheckpointError(f"{folder / MANIFEST} is damaged or not of schema {SCHEMA}")
    for name, digest in manifest["files"].items():
        path = folder / name
        if not path.is_file() or _hash(path) != digest:
            raise CheckpointError(f"{path} is missing or differs from what was written")
    return position


def companions(folder: Path) -> dict[str, bytes]:
    """Config and tokenizer files of a model folder by name: everything small that belongs to it but weights.

    Their contents and not their paths, because a run that resumed from a checkpoint outlives that folder.
    """
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in {".json", ".jinja", ".txt", ".model", ".py"}
        and not path.name.endswith(".index.json")
        and path.name != MANIFEST
    }


def write_companions(folder: Path, contents: dict[str, bytes]) -> None:
    """What `companions` read, beside a saved model; its own files stay as they are."""
    for name, content in contents.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)


def _manifest(position: Position, files: dict[str, str]) -> Json:
    # Through JSON and back, so that what is hashed now (tuples, integer keys) equals what a reader will hash.
    body: Json = json.loads(json.dumps({"schema": SCHEMA, **asdict(position), "files": files}))
    return body | {"sha256": hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()}


def _steps(root: Path) -> list[Path]:
    """Checkpoint folders by rising step, valid or not."""
    found = [path for path in root.glob("step-*") if path.is_dir() and _STEP.fullmatch(path.name)]
    return sorted(found, key=_number)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _prune(root: Path, keep: int) -> None:
    for folder in [*_steps(root)[:-keep], *root.glob(f"{_TEMPORARY}*")]:
        shutil.rmtree(folder)


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries: a rename is on disk only when its parent folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
