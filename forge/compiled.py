"""The simulator's core compiled to C by mypyc: the same sources, two to three times as fast.

    make fast          # python -m forge.compiled: builds it, a minute or two; needs a C compiler and the `dev` extra

A build belongs to the very sources it was made of: edit one of them, and they run as they are until the next build.
`FORGE_PURE=1` runs them as they are in any case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

MODULES = (
    "forge.cost.model",
    "forge.draws",
    "forge.instances",
    "forge.prefix_index",
    "sim.agents",
    "sim.alarm",
    "sim.clock",
    "sim.conversation",
    "sim.core",
    "sim.decodes",
    "sim.engine",
    "sim.fetch",
    "sim.fleet",
    "sim.iteration",
    "sim.kv",
    "sim.memory",
    "sim.plan",
    "sim.request",
    "sim.rollout",
    "sim.serve",
    "sim.sessions",
    "sim.shape",
    "sim.signals",
    "sim.span",
    "sim.synthetic",
    "sim.train_tokens",
)
PURE = "FORGE_PURE"
_HERE = Path(__file__).parent
_BUILDS = _HERE / "_compiled"


def sources() -> list[Path]:
    return [_HERE.parent.joinpath(*module.split(".")).with_suffix(".py") for module in MODULES]


def folder() -> Path:
    """Where a build of the present sources for this interpreter is, or would be."""
    digest = sha256(sys.version.encode())
    for source in sources():
        digest.update(source.read_bytes())
    return _BUILDS / digest.hexdigest()[:16]


class _Finder:
    """Finds compiled modules before Python finds their sources."""

    def __init__(self, build: Path) -> None:
        self._build = build

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - Python's protocol
        if name not in MODULES:
            return None
        return PathFinder.find_spec(name, [str(self._build.joinpath(*name.split(".")[:-1]))])


def in_use() -> bool:
    """Whether this process runs the compiled core."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def use() -> None:
    """From now on, where there is a build."""
    if os.environ.get(PURE) or in_use():
        return
    try:
        build = folder()
    except OSError:  # a source is missing: something else will complain
        return
    if build.is_dir():
        sys.path.append(str(build))  # the library that the compiled modules share is a module of its own
        sys.meta_path.insert(0, _Finder(build))


def ensure() -> str | None:
    """Build what is missing, in a process of its own, for processes to come. Returns why that did not work."""
    if folder().is_dir():
        return None
    done = subprocess.run(
        [sys.executable, "-m", "forge.compiled"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return None
    lines = done.stdout.strip().splitlines()
    return f"python -m forge.compiled failed: {lines[-1] if lines else done.returncode}"


def build() -> Path:
    """Compile; earlier builds go. Exits with the compiler's words where it fails."""
    from mypyc.build import mypycify
    from setuptools import setup

    os.chdir(_HERE.parent)
    _BUILDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILDS) as scratch:
        made = Path(scratch) / "made"
        paths = [str(source.relative_to(_HERE.parent)) for source in sources()]
        extensions = mypycify(paths, opt_level="3", target_dir=f"{scratch}/c")
        setup(
            name="forge-core",
            packages=[],
            ext_modules=extensions,
            script_args=["--quiet", "build_ext", "--build-lib", str(made), "--build-temp", f"{scratch}/o"],
        )
        for earlier in _BUILDS.iterdir():
            if earlier != Path(scratch):
                shutil.rmtree(earlier)
        return made.rename(folder())


if __name__ == "__main__":
    print(build())
