"""Options that several commands share."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from forge.types import ForgeError

ScenarioArg = Annotated[str, typer.Argument(help="A scenario file, or the name of one that ships.", show_default=False)]
RunArg = Annotated[str, typer.Argument(help="A run folder, its name under --runs, or `latest`.", show_default=False)]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one value, e.g. --set policy.scheduler.kind=greedy. Repeatable."),
]
PolicyFile = Annotated[
    Path | None, typer.Option("--policy", help="Deploy this policy.toml, as `forge tune` writes it.")
]
Runs = Annotated[Path, typer.Option("--runs", help="Where run folders are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object, last.")]

RUNS = Path("runs")


def check_out(path: Path) -> Path:
    """Before the work whose result goes there: make its folder. Raises ForgeError where no file can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ForgeError(f"{path}: cannot be written: {error.strerror}; choose another place with --out") from None
    return path


def print_json(data: Any) -> None:
    print(json.dumps(data, allow_nan=False))
