"""The simulator's core compiled to C by mypyc: the same sources, about twice as fast.

    make fast          # forge compile: builds it, two minutes; needs a C compiler and the `dev` extra

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

from forge.types import ForgeError

MODULES = (
    "forge.cost.model",
    "forge.draws",
    "forge.instances",
    "forge.metrics.fold",
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
    return _BUILDS / f"{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


class _Finder:
    """Finds compiled modules before Python finds their sources."""

    def __init__(self, build: Path) -> None:
        self._build = build

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002 - Python's protocol
        if name in MODULES:
            return PathFinder.find_spec(name, [str(self._build.joinpath(*name.split(".")[:-1]))])
        if name.endswith("__mypyc"):  # the library that they share
            return PathFinder.find_spec(name, [str(self._build)])
        return None


def in_use() -> bool:
    """Whether this process runs the compiled core."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def use() -> None:
    """From now on, where there is a build. Where there never was one, nothing is read."""
    if os.environ.get(PURE) or not _BUILDS.is_dir():
        return
    try:
        build = folder()
    except OSError:  # a source is missing: something else will complain
        return
    if build.is_dir():
        sys.meta_path.insert(0, _Finder(build))


def ensure() -> str | None:
    """Build what is missing, in a process of its own, for processes to come. Returns why that did not work."""
    if folder().is_dir():
        return None
    command = [sys.executable, "-m", "forge", "compile"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stdout.strip().splitlines()
    return f"forge compile failed: {lines[-1] if lines else done.returncode}"


def build() -> Path:
    """Compile, unless it is there. Earlier builds for this interpreter go. Raises ForgeError where that cannot be."""
    made = folder()
    if made.is_dir():
        return made
    try:
        from mypyc.build import mypycify
        from setuptools import setup
    except ImportError as error:
        raise ForgeError(f"{error}: the compiler is part of the dev extra, pip install 'forge-rl[dev]'") from None
    os.chdir(_HERE.parent)
    _BUILDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILDS, ignore_cleanup_errors=True) as scratch:
        paths = [str(source.relative_to(_HERE.parent)) for source in sources()]
        extensions = mypycify(paths, opt_level="3", target_dir=f"{scratch}/c")
        arguments = ["--quiet", "build_ext", "--build-lib", f"{scratch}/made", "--build-temp", f"{scratch}/o"]
        try:
            setup(name="forge-core", packages=[], ext_modules=extensions, script_args=arguments)
        except SystemExit as error:
            raise ForgeError(f"not compiled: {error}; is there a C compiler, and Python's headers?") from None
        if folder() != made:
            raise ForgeError("a source was edited while it was compiled: compile again")
        _swap(Path(scratch) / "made", made)
    return made


def _swap(new: Path, made: Path) -> None:
    """Put the build in its place, unless another process was quicker, and remove those that it replaces."""
    if not made.is_dir():
        new.rename(made)
    for earlier in _BUILDS.glob(f"{sys.implementation.cache_tag}-*"):
        if earlier != made:
            shutil.rmtree(earlier, ignore_errors=True)
