"""Recorded workloads for the simulator: `load` reads any of the known formats into a `sim.sessions.Trace`.

A format is one module with a `load(path, **options)`. Which one a path holds is seen from its content:

- mooncake: JSON lines with `timestamp`, and `hash_ids` or `input_length`
- azure: CSV whose first line names `ContextTokens`
- claude_code: CSV whose first line names `lcp_prev`; a JSON object with `requests`; a folder of these
- run_folder: a run folder, or its trace.jsonl (JSON lines that begin with `run_started`)
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from forge.types import ForgeError
from sim.sessions import Trace
from sim.traces import azure, claude_code, mooncake, run_folder
from sim.traces.reading import text_of

FORMATS = {
    "mooncake": mooncake.load,
    "azure": azure.load,
    "claude_code": claude_code.load,
    "run_folder": run_folder.load,
}


def load(path: str | Path, format: str | None = None, **options: Any) -> Trace:
    """The trace at `path`. `format`: one of FORMATS, None to see from the content. `options`: of the format's `load`.

    Raises ForgeError for an unknown format or option, and, naming file and line, for what is no such trace.
    """
    path = Path(path)
    if not path.exists():
        raise ForgeError(f"{path}: no such file or folder; give the path of a trace")
    name = format or _detect(path)
    if name not in FORMATS:
        raise ForgeError(f"format = {name!r}: no such format; known are {', '.join(FORMATS)}")
    reader = FORMATS[name]
    known = list(inspect.signature(reader).parameters)[1:]
    for option in options:
        if option not in known:
            raise ForgeError(f"{option}: no option of format {name}; its options are {', '.join(known)}")
    return reader(path, **options)


def _detect(path: Path) -> str:
    if path.is_dir():
        if (path / "trace.jsonl").is_file() or (path / "scenario.resolved.json").is_file():
            return "run_folder"
        if (path / "requests.csv").is_file() or any(path.glob("*.json")):
            return "claude_code"
        raise ForgeError(f"{path}: holds neither trace.jsonl nor requests.csv nor *.json; give the path of a trace")
    text = text_of(path)
    if not text.strip():
        raise ForgeError(f"{path}: empty; give a trace that holds requests")
    head = text.lstrip().split("\n", 1)[0]
    if head.startswith("{"):
        return _detect_json(path, head, text)
    columns = [name.strip() for name in head.split(",")]
    for column, name in (("ContextTokens", "azure"), ("lcp_prev", "claude_code")):
        if column in columns:
            return name
    raise _unknown(path, head)


def _detect_json(path: Path, head: str, text: str) -> str:
    if '"timestamp"' in head and ('"hash_ids"' in head or '"input_length"' in head):
        return "mooncake"
    if '"run_started"' in head:
        return "run_folder"
    if '"hash_id_scope"' in text and '"requests"' in text:
        return "claude_code"
    raise _unknown(path, head)


def _unknown(path: Path, head: str) -> ForgeError:
    return ForgeError(
        f"{path}:1: the format cannot be seen from {head[:60]!r}; give format: one of {', '.join(FORMATS)}"
    )
