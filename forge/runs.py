"""Run folders: where a run keeps everything it makes, and how it is found again.

    runs/<YYYYmmdd-HHMMSS>-<scenario>/    runs/latest -> the newest

Only `meta.json` holds real times, so that everything else of a simulated run is byte-identical per seed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from forge import trace as ev
from forge.scenario import Scenario, parse, policy_toml, resolved
from forge.temporary import temporary_for
from forge.types import ForgeError, Json

LATEST = "latest"

#: every file a run folder may hold, and what it is
FILES = {
    "README.txt": "this list",
    "scenario.resolved.json": "the scenario with every value spelled out; `forge replay` and `--resume` read it",
    "policy.toml": "the policies and queue numbers this run deployed; give it to another run with --policy",
    "trace.jsonl": "every event of the run, one JSON object a line; `forge replay` repeats every decision from it",
    "summary.json": "the figures: throughput, lag, idle shares, reward, yield; the same keys simulated and live",
    "requests.parquet": "one row a request: where and when it ran, its tokens, its weights; units are in the schema",
    "items.parquet": "one row an item: its times, lag, staleness, reward and where it ended; units are in the schema",
    "capacity.txt": "of a simulated run without a trace: what bounds it, devices a day takes, latencies",
    "meta.json": "real start and elapsed time of every life, the machine, versions, the command",
    "scores.json": "of `forge eval`: every task's score in every scaffold, means, and the spread between scaffolds",
    "scores.png": "those means, with their intervals",
    "prediction.json": "what the simulator predicted of this run, written before the first training step",
    "evaluation.json": "score of every held-out task before and after training",
    "trace.perfetto.json": "the run on a time axis, if `forge export --perfetto` made it: open it in ui.perfetto.dev",
    "report.html": "the report: open it in a browser; its pictures are the *.png files here",
    "calibration.toml": "the simulator's model of this machine, fitted to the probe; use it with --calibration",
    "tune.json": "every candidate that tuning tried, and why it was or was not chosen",
    "tune.md": "tuning's report: what it gains on held-out seeds, what trades for what, how sure the choice is",
    "pareto.png": "throughput of those candidates against lag, non-stationarity and p99 time to first token",
    "importance.png": "how much each key that tuning varied mattered",
    "sensitivity.png": "throughput, lag, idle time and non-stationarity of those candidates against the window",
    "probe/": "the short live run that calibration measured: a run folder of its own",
    "pool.sqlite": "the data pool of a live run: items and trajectories; `--resume` goes on from it",
    "engine-0/": "of a live run with vLLM: its server's log, and links to the weights it reads; one for each instance",
    "checkpoints/": "model, optimiser and pool position of a live run; newest last",
}

PACKAGES = ("forge-rl", "numpy", "pydantic", "simpy", "torch", "transformers")


def write_text(path: Path, text: str) -> None:
    """Atomic: a reader, or a kill -9, meets the old file or the new one, never half of one."""
    temporary = temporary_for(path)
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, data: Any) -> None:
    """Atomic, indented, keys in the order given. NaN and infinity are refused: JSON has neither."""
    write_text(path, json.dumps(data, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Json | None:
    """The object in a file, or None where there is no file. Raises ForgeError where it is not a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ForgeError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ForgeError(f"{path}: not a JSON object")
    return data


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder. `create` makes it, `open` finds it; both give one that has a readable scenario."""

    path: Path

    @classmethod
    def create(
        cls, root: str | Path, scenario: Scenario, command: Sequence[str] | None = None, *, is_latest: bool = True
    ) -> RunFolder:
        """Make a new folder under `root`, fill in what is known before a run, and point `root/latest` at it if
        `is_latest`.

        `command` is what was typed; the process's own by default.
        """
        folder = cls(_new_folder(Path(root), scenario.name))
        write_json(folder.path / "scenario.resolved.json", resolved(scenario))
        queue = {"n": scenario.queue.n, "concurrency": scenario.queue.concurrency}
        deployed = policy_toml(scenario.policy, {"queue": queue}, comment=f"deployed by {scenario.name}")
        write_text(folder.path / "policy.toml", deployed)
        listing = "".join(f"{name:<24}{what}\n" for name, what in FILES.items())
        write_text(folder.path / "README.txt", f"A run of Forge. Not every run makes every file.\n\n{listing}")
        folder.begin_life(command)
        if is_latest:
            _point_latest(folder.path)
        return folder

    @classmethod
    def open(cls, path: str | Path, root: str | Path = "runs") -> RunFolder:
        """A run folder by its path, by its name under `root`, or `latest`. Raises ForgeError."""
        if not str(path).strip():
            raise ForgeError(f"an empty name is no run; give a folder under {root}/, or `{LATEST}` for the newest")
        for candidate in (Path(path), Path(root) / path):
            if (candidate / "scenario.resolved.json").is_file():
                return cls(candidate.resolve())
        if Path(path).is_dir():
            raise ForgeError(f"{path}: not a run folder: it holds no scenario.resolved.json")
        raise ForgeError(f"{path}: no such run; give a folder under {root}/, or `{LATEST}` for the newest")

    # --- files ------

    @property
    def trace(self) -> Path:
        return self.path / "trace.jsonl"

    def events(self) -> Iterator[ev.Event]:
        """The trace's events in order. Raises TraceError."""
        return ev.read(self.trace)

    def scenario(self) -> Scenario:
        path = self.path / "scenario.resolved.json"
        return parse(read_json(path) or {}, str(path))

    def read(self, name: str) -> Json | None:
        """A JSON file of the folder, None where there is none."""
        return read_json(self.path / name)

    def write(self, name: str, data: Json) -> None:
        write_json(self.path / name, data)

    def not_begun(self) -> ForgeError:
        """What to say where Ctrl-C came before the first event."""
        return ForgeError(
            f"stopped before training began; nothing was lost; go on with: forge run --resume {self.path}"
        )

    # --- real time ------

    def begin_life(self, command: Sequence[str] | None = None) -> None:
        """Note in `meta.json` that a process starts to work on this run: once at `create`, once a resume."""
        meta = self.read("meta.json") or {"lives": []}
        meta |= {"machine": machine(), "versions": versions()}
        started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        given = list(sys.argv if command is None else command)
        meta["lives"].append({"started": started, "unix_s": time.time(), "elapsed_s": None, "command": given})
        self.write("meta.json", meta)

    def end_life(self) -> None:
        """Note how long this life took, in real seconds. A killed life keeps null."""
        meta = self.read("meta.json")
        if not meta or not meta.get("lives"):
            raise ForgeError(f"{self.path / 'meta.json'}: no life has begun")
        life = meta["lives"][-1]
        life["elapsed_s"] = time.time() - life["unix_s"]
        self.write("meta.json", meta)

    def command(self) -> str:
        """What was typed to make this run, for the reader who wants it again."""
        lives = (self.read("meta.json") or {}).get("lives") or [{}]
        given: list[str] = lives[0].get("command", [])
        return " ".join([Path(given[0]).name, *given[1:]]) if given else ""


def machine() -> Json:
    """What ran it."""
    return {
        "platform": platform.platform(),
        "processor": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that matter; null: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _new_folder(root: Path, name: str) -> Path:
    """A folder that did not exist: `mkdir` decides between two runs that start in one second."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = root / (base if attempt == 1 else f"{base}-{attempt}")
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise ForgeError(f"{root}: cannot make a run folder here: {error.strerror}") from None
    raise ForgeError(f"{root}: a thousand runs of {name} began in this second")


def _point_latest(folder: Path) -> None:
    """Replace the link in one move, so that `latest` always names a whole run."""
    temporary = folder.parent / f".{LATEST}.{os.getpid()}.{folder.name}"
    temporary.symlink_to(folder.name)
    try:
        os.replace(temporary, folder.parent / LATEST)
    except OSError:
        temporary.unlink()
        raise ForgeError(f"{folder.parent / LATEST}: is in the way of the link to the newest run; move it") from None
