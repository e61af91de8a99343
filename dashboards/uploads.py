"""What a person chooses or uploads: scenarios, run folders, traces. A broken one is a ForgeError of one sentence."""

from __future__ import annotations

import getpass
import hashlib
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge import scenario as scenarios
from forge import trace as ev
from forge.runs import read_json
from forge.scenario import Scenario, parse
from forge.types import ForgeError
from sim import traces
from sim.traces.reading import Recorded

LOCKS = Path("/proc/locks")
LIVE_S = 30.0  # a trace without an end that grew within so many seconds is still being written
TAIL = 4096  # bytes of a trace in which its last event is looked for

State = Literal["begins", "live", "ended", "stopped", "no trace"]


# --- scenarios ------


def shipped() -> list[str]:
    """The one to begin with first."""
    names = sorted(path.stem for path in scenarios.scenarios_dir().glob("*.toml"))
    return sorted(names, key=lambda name: name != "quickstart")


def scenario_from(data: bytes, name: str) -> Scenario:
    """Of an uploaded file. Raises ForgeError."""
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise ForgeError(f"{name}: not a text file; a scenario is TOML, such as scenarios/quickstart.toml") from None
    except tomllib.TOMLDecodeError as error:
        raise ForgeError(f"{name}: not valid TOML: {error}") from None
    except RecursionError:
        raise ForgeError(f"{name}: nested too deeply") from None
    return parse(table, name)


def opening(name: str) -> str:
    """The comment that a shipped scenario begins with: the question it asks."""
    path = scenarios.find(name)
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    first, _, _ = " ".join(lines).partition("? ")
    return f"{first}?" if lines else ""


# --- runs ------


@dataclass(frozen=True, slots=True)
class Listed:
    """A run folder, and what its trace says of it. `changed_s`: seconds since the epoch."""

    name: str
    path: Path
    state: State
    changed_s: float

    def label(self) -> str:
        marks = {"begins": "● begins", "live": "● live", "ended": "", "stopped": "no end", "no trace": "figures only"}
        return f"{self.name}   {marks[self.state]}".rstrip()


def runs_in(root: Path) -> list[Listed]:
    """Runs under a folder and in the folders right beneath it, those that changed last first."""
    depths = ("*", "*/*")
    found = {path.parent.resolve() for depth in depths for path in root.glob(f"{depth}/scenario.resolved.json")}
    return sorted((listed(path, root) for path in found), key=lambda one: (-one.changed_s, one.name))


def listed(path: Path, root: Path) -> Listed:
    trace = path / "trace.jsonl"
    newest = trace if trace.is_file() else path / "scenario.resolved.json"
    whole = root.resolve()
    name = str(path.relative_to(whole)) if path.is_relative_to(whole) else str(path)
    return Listed(name, path, state_of(trace), newest.stat().st_mtime)


def state_of(trace: Path) -> State:
    works = is_held(trace.parent / "pool.sqlite.lock")
    if not ev.has_events(trace):
        return "begins" if works else "no trace"
    with trace.open("rb") as file:
        file.seek(max(0, trace.stat().st_size - TAIL))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    if b'"e":"run_ended"' in last:
        return "ended"
    return "live" if works or time.time() - trace.stat().st_mtime < LIVE_S else "stopped"


def is_held(lock: Path) -> bool:
    """Whether a process holds it, as far as the system tells (Linux does). Looking takes it from nobody."""
    if not lock.is_file() or not LOCKS.is_file():
        return False
    inode = f":{lock.stat().st_ino}"
    return any(line.split()[5].endswith(inode) for line in LOCKS.read_text().splitlines() if "->" not in line)


# --- uploads on disk ------


def kept(data: bytes, name: str) -> Path:
    """An upload as a file, the same for the same bytes, so that what was read of it can be found again."""
    whose, digest = f"forge-dashboard-{getpass.getuser()}", hashlib.sha256(data).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / whose / digest
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (Path(name).name or "upload")
    if not path.is_file() or path.stat().st_size != len(data):
        path.write_bytes(data)
    return path


def scenario_of_trace(path: Path, name: str) -> Scenario:
    """Of an uploaded trace without its scenario: the one that ships under the name that the trace gives. Raises
    ForgeError where there is none."""
    with called(path, name):
        first = next(ev.read(path))
    assert isinstance(first, ev.RunStarted)
    if first.scenario not in shipped():
        raise ForgeError(
            f"{name}: a trace of the scenario {first.scenario!r}, which does not ship; upload its "
            f"scenario.resolved.json beside it, which says what N and the window are"
        )
    return scenarios.load(first.scenario)


def resolved_scenario(data: bytes, name: str) -> Scenario:
    """An uploaded scenario.resolved.json, or a scenario in TOML."""
    if not name.endswith(".json"):
        return scenario_from(data, name)
    path = kept(data, name)
    with called(path, name):
        return parse(read_json(path) or {}, name)


@contextmanager
def called(path: Path, name: str) -> Iterator[None]:
    """Errors name the file as the person does who uploaded it."""
    try:
        yield
    except ForgeError as error:
        raise ForgeError(str(error).replace(str(path), name)) from None


# --- recorded workloads ------


def workload(path: Path) -> Recorded:
    """Any trace that `sim.traces` reads. Raises ForgeError."""
    found = traces.load(path)
    return found if isinstance(found, Recorded) else Recorded(found.block, tuple(found.sessions()))
