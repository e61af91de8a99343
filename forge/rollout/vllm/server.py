"""One server process of vLLM, from its start to its end: its folder, its log, its health."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import httpx

from forge.processes import belong_to
from forge.rollout.engine import EngineDied, EngineError
from forge.rollout.vllm.command import LOOPBACK, Launch, check_environment, launch
from forge.scenario import Scenario

POLL_S = 0.25
LEAVE_S = 5.0
LOG_LINES = 12
#: what a checkpoint holds beside the model
OTHERS = ("optimizer.safetensors",)


class Server:
    """A server of vLLM as a child of this process. Ends with it, however it ends."""

    def __init__(self, launch: Launch, model: Path, log: Path) -> None:
        """`model`: the folder that it serves."""
        self.url = launch.url
        self.model = model
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                launch.argv,
                env={**os.environ, **launch.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # one group: ended as a whole
                preexec_fn=_with(os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> None:
        """Until it is healthy. Raises EngineError, with the end of its log, where it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.lives:
                raise EngineError(f"vLLM ended while it started, with {self._process.returncode}; {self.last_words()}")
            if time.monotonic() > deadline:
                self.stop()
                raise EngineError(
                    f"vLLM was not up within engine.vllm.start_timeout_s = {timeout_s:g}; {self.last_words()}"
                )
            try:
                if httpx.get(f"{self.url}/health", timeout=POLL_S * 4).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)

    def last_words(self) -> str:
        """The end of its log, for an error message."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.is_file() else []
        return "\n".join([f"the end of {self.log}:", *lines[-LOG_LINES:]])

    def died(self, why: str) -> EngineDied:
        """What to raise where it no longer answers; nothing of it is left."""
        self.stop()
        return EngineDied(f"vLLM no longer serves ({why}); {self.last_words()}")

    def stop(self) -> None:
        """The server and what it started are gone when this returns."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            self._wait_for_group()
        self._process.wait()

    def _wait_for_group(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline:
            self._process.poll()
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(POLL_S / 5)


def start(scenario: Scenario, instance: int, model: Path, scratch: Path) -> Server:
    """Start the server of `instance`, serving `model`; it is not up yet. `scratch`: its folder. Raises ForgeError."""
    check_environment(scenario)
    scratch.mkdir(parents=True, exist_ok=True)
    write_plugin(scratch / "plugin")
    port = scenario.engine.vllm.port + instance if scenario.engine.vllm.port else free_port()
    served = served_folder(model, scratch)
    return Server(launch(scenario, instance, served, port, scratch.absolute()), served, scratch / "vllm.log")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def served_folder(model: Path, scratch: Path) -> Path:
    """A folder with what vLLM needs of model folder `model`: it would take every safetensors file there for weights,
    the optimiser's too. Older ones go. Hard links, so that a checkpoint which the trainer removes meanwhile stays.

    Raises EngineError where the model is not there, or no longer.
    """
    folder = scratch.absolute() / "weights" / model.absolute().name
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        for path in model.absolute().iterdir():
            if path.is_file() and path.name not in OTHERS:
                _link(path.resolve(), folder / path.name)
    except OSError as error:
        raise EngineError(f"{model}: {error.strerror}") from None
    return folder


def _link(path: Path, name: Path) -> None:
    try:
        os.link(path, name)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM):
            raise
        name.symlink_to(path)  # a model on another file system, which nobody removes


def write_plugin(folder: Path) -> None:
    """The plug-in as a distribution that vLLM finds on its path: `plugin.py` of this package, and its entry point."""
    info = folder / "forge_vllm_plugin-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    source = resources.files("forge.rollout.vllm").joinpath("plugin.py").read_text(encoding="utf-8")
    (folder / "forge_vllm_plugin.py").write_text(source, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-vllm-plugin\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nforge = forge_vllm_plugin:register\n")


def _with(parent: int) -> Callable[[], None]:
    """What the new process does first, so that it does not outlive this one."""
    return lambda: belong_to(parent)
