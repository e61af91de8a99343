"""Tuning in the background: each job is a folder with a `forge tune` at work in it, found again by any page.

    <runs>/tuning/<time>-<scenario>/    scenario.toml, job.json, log.txt, and what `forge tune` writes

A job stopped half way goes on with the same command, as `forge tune` does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from dashboards.frames import Frame
from forge.runs import read_json, write_json, write_text
from forge.scenario import Scenario, resolved
from forge.types import ForgeError, Json
from sim.candidates import default_space
from sim.choose import OBJECTIVES
from sim.search import TRIALS
from sim.space import Space
from sim.space_text import from_params, from_table, space_of

FOLDER = "tuning"
SEED = re.compile(rb'"[0-9a-f]{16} seed \d+"')  # of the journal: the figures of one simulated run

State = Literal["running", "done", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What is to be tuned. `params`: as after --param; none: window, N and concurrency. `steps` 0: whole runs."""

    scenario: Scenario
    params: tuple[str, ...] = ()
    seeds: int = 10
    steps: int = 30
    trials: int | None = None
    workers: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    path: Path

    @property
    def policy(self) -> Path:
        return self.path / "policy.toml"

    def about(self) -> Json:
        return read_json(self.path / "job.json") or {}

    def result(self) -> Json | None:
        """`tune.json`, once there is one."""
        return read_json(self.path / "tune.json")

    def state(self) -> State:
        about = self.about()
        if self.result() is not None and self.policy.is_file():
            return "done"
        if _lives(about.get("pid")):
            return "running"
        return "failed" if self.complaint() else "stopped"

    def runs_made(self) -> int:
        """Simulated runs whose figures are kept."""
        journal = self.path / "tune.journal"
        return len(set(SEED.findall(journal.read_bytes()))) if journal.is_file() else 0

    def complaint(self) -> str:
        """What the command said was wrong; empty: nothing."""
        log = self.path / "log.txt"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        return "\n".join(line.removeprefix("error: ") for line in lines if line.startswith("error: "))


def plan(ask: Ask) -> tuple[Space, int]:
    """The space and the most runs that tuning makes of it. Raises ForgeError where the space is none."""
    written = from_table(ask.scenario.tune, f"{ask.scenario.name}: [tune]") | from_params(ask.params)
    space = space_of(written, ask.scenario) if written else default_space(ask.scenario)
    choosing = (ask.seeds + 1) // 2
    points = ask.trials or _points(space)
    return space, (points + 1) * choosing + 2 * (ask.seeds - choosing)


def _points(space: Space) -> int:
    if space.points is not None:
        return len(space.points)
    every, count = space.every(), 0
    for _ in every or ():
        count += 1
        if count >= TRIALS:
            break
    return count or TRIALS


def start(ask: Ask, runs: Path) -> Job:
    """Begin a tuning. Raises ForgeError where its space is none, or no folder can be made."""
    _, most = plan(ask)
    job = Job(_new_folder(runs / FOLDER, ask.scenario.name))
    write_text(job.path / "scenario.toml", scenario_toml(ask.scenario))
    options = [f"--seeds={ask.seeds}", f"--steps={ask.steps}", *(f"--param={one}" for one in ask.params)]
    options += [f"--trials={ask.trials}"] if ask.trials else []
    options += [f"--workers={ask.workers}"] if ask.workers else []
    write_json(job.path / "job.json", {"scenario": ask.scenario.name, "options": options, "most_runs": most})
    go_on(job)
    return job


def go_on(job: Job) -> None:
    """Start the job's command, for the first time or again."""
    command = command_of(job)
    with (job.path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    write_json(job.path / "job.json", job.about() | {"pid": process.pid, "started_s": time.time()})
    threading.Thread(target=process.wait, daemon=True).start()  # else it stays a zombie, which looks alive


def command_of(job: Job) -> list[str]:
    """What goes on with it from a shell, too."""
    scenario, policy = str(job.path / "scenario.toml"), str(job.policy)
    return ["forge", "tune", scenario, "-o", policy, *job.about().get("options", ())]


def stop(job: Job) -> None:
    """What it found out is kept, and its workers end with it."""
    pid = job.about().get("pid")
    if isinstance(pid, int) and _lives(pid):
        os.kill(pid, signal.SIGTERM)


def jobs(runs: Path) -> list[Job]:
    """The newest first."""
    return [Job(path.parent) for path in sorted((runs / FOLDER).glob("*/job.json"), reverse=True)]


def scenario_toml(scenario: Scenario) -> str:
    """The scenario as a file that `forge` reads: every value spelled out but those that are not set."""
    return tomli_w.dumps(_without_null(resolved(scenario)))


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items() if one is not None}
    return [_without_null(one) for one in value] if isinstance(value, list | tuple) else value


def _lives(pid: Any) -> bool:
    """Whether that process is a `forge tune`, and not one that got its number later."""
    if not isinstance(pid, int):
        return False
    try:
        told = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return sys.platform != "linux" and _answers(pid)
    return b"tune" in told


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _new_folder(root: Path, name: str) -> Path:
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "scenario"
    base = f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}"
    for attempt in range(1, 100):
        path = root / (base if attempt == 1 else f"{base}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ForgeError(f"{path}: cannot be made: {error.strerror}") from None
        return path
    raise ForgeError(f"{root}: a hundred tunings of {name} began in this second")


# --- what came of it ------


def front(result: Json) -> Frame:
    """Every candidate that was run on a seed: means of the objectives, and what became of it."""
    columns: dict[str, list[Any]] = {key: [] for key in (*OBJECTIVES, "what", "set")}
    for one in _ordered(result):
        figures = one["figures"]
        if not all(key in figures for key in OBJECTIVES):
            continue
        for key in OBJECTIVES:
            columns[key].append(figures[key]["mean"])
        columns["what"].append(_standing(one, result))
        columns["set"].append(described(one["set"]))
    return Frame(columns)


def _ordered(result: Json) -> Sequence[Json]:
    """What stands out last, so that it is drawn on top."""
    order = ("dropped early", "beaten by another", "beaten by none in everything", "the scenario's own", "chosen")
    candidates: list[Json] = result["candidates"]
    return sorted(candidates, key=lambda one: order.index(_standing(one, result)))


def _standing(one: Json, result: Json) -> str:
    if one["set"] == result["chosen"]["set"]:
        return "chosen"
    if one["set"] == result["own"]["set"]:
        return "the scenario's own"
    if one["pareto"]:
        return "beaten by none in everything"
    most = max(other["seeds_run"] for other in result["candidates"])
    return "beaten by another" if one["seeds_run"] == most else "dropped early"


def described(point: Json) -> str:
    """A point's keys and values, without the tables' names."""
    texts = {path: f"{value:.3g}" if isinstance(value, float) else str(value) for path, value in point.items()}
    return ", ".join(f"{path.removeprefix('policy.')} = {text}" for path, text in texts.items())


def gains(result: Json) -> list[tuple[str, float, float, Json]]:
    """Held-out seeds: an objective's label, the own policy's mean, the chosen one's, the gain with its bounds."""
    held = result["held_out"]
    return [
        (OBJECTIVES[key][0], held["own"][key]["mean"], held["chosen"][key]["mean"], gain)
        for key, gain in held["gains"].items()
    ]


def log_tail(job: Job, lines: int = 12) -> str:
    log = job.path / "log.txt"
    if not log.is_file():
        return ""
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def bounds(gain: Json) -> str:
    """`+12.3 [+4.1, +20.5]`; without bounds of one observation."""
    low, high = gain["low"], gain["high"]
    mean = f"{gain['mean']:+.4g}"
    return mean if low is None else f"{mean} [{low:+.4g}, {high:+.4g}]"
