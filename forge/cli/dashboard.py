"""`forge dashboard`: runs, what-ifs, traces and tuning in a browser."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

import forge
from forge.cli import app
from forge.cli.options import RUNS, Runs
from forge.types import ForgeError

HOST = "127.0.0.1"
PACKAGES = ("streamlit", "altair", "pandas")


@app.command()
def dashboard(
    runs: Runs = RUNS,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the pages are served, on 127.0.0.1.")] = 8501,
) -> None:
    """Look at runs, also live ones, ask what-if, serve traces and tune, in a browser. Ctrl-C ends it."""
    page = _app()
    _check_free(port)
    where = f"runs in {runs}" if runs.is_dir() else f"{runs} does not exist yet, so there is no run to show"
    print(f"dashboard: http://{HOST}:{port} ({where}; Ctrl-C ends it)", flush=True)
    options = {
        "server.headless": "true",
        "server.address": HOST,
        "server.port": str(port),
        "server.fileWatcherType": "none",
        "server.maxUploadSize": "1000",
        "browser.gatherUsageStats": "false",
        "runner.magicEnabled": "false",
        "client.toolbarMode": "minimal",
        "client.showErrorDetails": "full",  # whatever is no user's fault is a fault of ours, to be seen
        "theme.base": "light",
        "theme.primaryColor": "#0072B2",
        "logger.level": "error",
    }
    command = [sys.executable, "-P", "-m", "streamlit", "run", str(page)]
    command += [f"--{key}={value}" for key, value in options.items()]
    os.environ["FORGE_RUNS"] = str(runs.resolve())
    # This forge, and no other that lies where the command was given: -P keeps that folder from the path.
    root = str(Path(forge.__file__).parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Streamlit has a banner of its own
    os.execv(sys.executable, command)  # one process, so that whoever ends it ends the server


def _app() -> Path:
    """The script that Streamlit runs. Raises ForgeError where the `dash` extra is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ForgeError(f"the dashboard needs {', '.join(missing)}: pip install 'forge-rl[dash]'")
    found = importlib.util.find_spec("dashboards")
    if found is None or not found.submodule_search_locations:
        raise ForgeError("the dashboards package is not installed with forge: install forge-rl again")
    return Path(found.submodule_search_locations[0]) / "app.py"


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ForgeError(f"--port {port}: cannot be had on {HOST}: {error.strerror}; give another --port") from None
