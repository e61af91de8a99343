"""What tuning has found out so far, in an Optuna study: trials, and the figures of every simulated run.

In a file it outlives the process: after a kill -9 the same command asks for the same points again, and runs whose
figures are kept are not made again. Another scenario, space, set of seeds or version of the simulator is another study
in the same file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.study import StudyDirection
from optuna.trial import TrialState

from forge import types
from forge.scenario import Scenario, resolved
from forge.types import ForgeError
from sim.candidates import Candidate
from sim.choose import OBJECTIVES
from sim.space import Space
from sim.sweep import Outcome
from sim.tunable import Point

optuna.logging.set_verbosity(optuna.logging.WARNING)

ROUND = "round"  # of a trial: the number of the first one asked for with it
STARTUP = 10  # random points before the sampler learns from them


class Study:
    """One tuning's trials and runs. `path` None: in memory. A file belongs to one process at a time."""

    def __init__(
        self, scenario: Scenario, space: Space, seeds: Sequence[int], path: Path | None, seed: int = 0
    ) -> None:
        self._seed = seed
        self._file = None if path is None else _locked(path)
        up, down = StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE
        directions = [up if more else down for _, more in OBJECTIVES.values()]
        try:
            self._study = optuna.create_study(
                storage=None if path is None else JournalStorage(JournalFileBackend(str(path), _Ours(str(path)))),
                study_name=f"{scenario.name} {_identity(scenario, space, seeds)}",
                directions=[*directions, down],  # the last: devices
                load_if_exists=True,
            )
            self._settle()
            self._runs: dict[str, Any] = self._study.user_attrs
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # its lines are not a journal's
            self.close()
            raise ForgeError(f"{path}: not a study of tuning; move it, or choose another place with --out") from error
        self.kept = len(self._runs)

    def _settle(self) -> None:
        """Points that an earlier life asked for and did not finish are asked for again."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study.tell(trial.number, state=TrialState.FAIL)

    def close(self) -> None:
        """Let another process have the file."""
        if self._file is not None:
            self._file.close()

    def done(self) -> int:
        return len(self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)))

    def rounds(self, space: Space) -> list[list[Point]]:
        """Points of the trials that ended, in their order, by the round in which they were asked for."""
        found: dict[int, list[Point]] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            point = tuple((d.path, trial.params[d.path]) for d in space.dimensions if d.path in trial.params)
            found.setdefault(trial.user_attrs.get(ROUND, 0), []).append(point)
        return list(found.values())

    # --- runs ------

    def outcome(self, one: Candidate, seed: int) -> Outcome | None:
        """None: not simulated yet."""
        kept: Outcome | None = self._runs.get(_key(one, seed))
        return kept

    def keep(self, one: Candidate, seed: int, outcome: Outcome) -> None:
        self._runs[_key(one, seed)] = outcome
        self._study.set_user_attr(_key(one, seed), outcome)

    # --- trials ------

    def ask(self, space: Space, count: int) -> list[tuple[optuna.Trial, Point]]:
        """A round of points. They depend on the trials before them alone, so they are the same in another life."""
        first, asked = self.done(), []
        for number in range(first, first + count):
            self._study.sampler = optuna.samplers.TPESampler(
                seed=int.from_bytes(_digest(self._seed, number)[:4], "big"), n_startup_trials=STARTUP
            )
            trial = self._study.ask()
            trial.set_user_attr(ROUND, first)
            asked.append((trial, space.suggest(trial)))
        return asked

    def tell(self, trial: optuna.Trial, values: Sequence[float] | None, excess: Mapping[str, float]) -> None:
        """`values` None: the point is none. `excess` over budgets: constraints that a value above 0 violates."""
        for key, value in excess.items():
            trial.set_constraint(key, value)
        if values is None:
            self._study.tell(trial, state=TrialState.PRUNED)
        else:
            self._study.tell(trial, list(values))

    def note(self, space: Space, point: Point, values: Sequence[float] | None) -> None:
        """A trial whose point no sampler was asked for."""
        made = optuna.create_trial(
            state=TrialState.PRUNED if values is None else TrialState.COMPLETE,
            values=None if values is None else list(values),
            params=dict(point),
            distributions=space.distributions(point),
        )
        self._study.add_trial(made)


class _Ours(JournalFileOpenLock):
    """The file is locked as a whole for as long as the study is open; a lock that a kill leaves behind would stay."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


def _locked(path: Path) -> IO[bytes]:
    """Ours until it is closed, or the process ends, however it ends; cut after its last whole line."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ForgeError(f"{path}: another forge tune is at work there; wait, or give another --out") from None
    file.seek(0)
    held = file.read()
    if held.startswith(b"{"):  # a journal, and not something that merely bears its name
        file.truncate(held.rfind(b"\n") + 1)
    return file


def _key(one: Candidate, seed: int) -> str:
    return f"{_digest(one.point, seed).hex()[:16]} seed {seed}"


def _digest(*what: Any) -> bytes:
    return hashlib.sha256(json.dumps(what).encode()).digest()


def _identity(scenario: Scenario, space: Space, seeds: Sequence[int]) -> str:
    """Of everything that a figure or a point depends on."""
    dimensions = [repr(dimension) for dimension in space.dimensions]
    whole = resolved(scenario), dimensions, space.points, list(seeds), _files(scenario), _sources()
    return _digest(*whole).hex()[:12]


def _files(scenario: Scenario) -> list[str]:
    """Of the files that a deployment names."""
    on = scenario.sim.deployment
    named = [] if on is None else [Path(one) for one in (on.model, on.hardware, on.calibration) if one]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in named if path.is_file()]


def _sources() -> str:
    """Of the code: figures of another simulator are not these."""
    digest = hashlib.sha256()
    for package in (Path(types.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
