"""`forge blackbox install`: programs of others from their registries, each in a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from forge.blackbox.catalog import PROGRAMS, NodeProgram, Program
from forge.sandbox.child import PATH
from forge.types import ForgeError

#: lines of an installer's errors that are shown
_SHOWN = 5


def named(names: Sequence[str]) -> dict[str, Program]:
    """Those programs, or all. Raises ForgeError."""
    for name in names:
        if name not in PROGRAMS:
            raise ForgeError(f"{name}: no program known by that name; there are {', '.join(PROGRAMS)}")
    return {name: PROGRAMS[name] for name in names or PROGRAMS}


def is_installed(folder: Path, program: Program) -> bool:
    return (folder / program.shows).exists()


def install(folder: Path, name: str, program: Program, say: Callable[[str], None]) -> None:
    """Into `folder`, unless it is there. Raises ForgeError, and leaves nothing half made."""
    if is_installed(folder, program):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    say(f"{name}: {' '.join(program.packages)}")
    try:
        if isinstance(program, NodeProgram):
            _npm(folder, program)
        else:
            _pip(folder, program)
        if not is_installed(folder, program):
            raise ForgeError(f"{name}: was installed, and {folder / program.shows} is not there")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _npm(folder: Path, program: NodeProgram) -> None:
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
    _run([_found("npm"), "install", "--prefix", str(folder), "--save-exact", *quiet, *program.packages])
    for script in program.setup:
        _run([_found("node"), Path(script).name], cwd=(folder / script).parent)


def _pip(folder: Path, program: Program) -> None:
    """With the system's Python, as that is there in a sandbox too."""
    _run([_found("python3"), "-m", "venv", str(folder)])
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *program.packages])


def _found(program: str) -> str:
    path = shutil.which(program, path=PATH)
    if path is None:
        raise ForgeError(f"{program}: not installed under {PATH}; apt-get install python3-venv nodejs npm")
    return path


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "WARNING" not in line]
        raise ForgeError(f"{' '.join(command)} failed:\n" + "\n".join(lines[-_SHOWN:]))
