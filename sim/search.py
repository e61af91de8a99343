"""The search: candidates are simulated on a few seeds, what is hopeless is dropped, the rest meets all seeds.

A space that can be listed within the trials is tried whole; else Optuna's multi-objective TPE asks for points, in
rounds whose size does not depend on the machine. So the result depends on scenario, space, seeds and trials alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import optuna

from forge.scenario import Scenario
from forge.types import ForgeError
from sim.candidates import Candidate, candidate, unchecked
from sim.choose import OBJECTIVES, UNREST, Budgets, hopeless
from sim.measure import Figures
from sim.space import Space
from sim.study import Study
from sim.sweep import Run, split
from sim.tunable import Point

FIRST = 2  # seeds that every candidate meets before the hopeless are dropped
ROUND = 12  # points asked for at a time
TRIALS = 60  # of a space too large to be listed
BARREN = 5  # points asked for per trial, at most, where many are no scenario or known

Tell = Callable[[int, int], None]  # runs made of those planned


class Search:
    """Everything tried. `own`: the scenario's own policy, which is never dropped. `refused`: why a candidate was."""

    def __init__(
        self, scenario: Scenario, space: Space, seeds: Sequence[int], study: Study, run: Run, budgets: Budgets
    ) -> None:
        self.scenario = scenario
        self.space = space
        self.seeds = tuple(seeds)
        self.study = study
        self.budgets = budgets
        self.own: Candidate = unchecked(scenario, space.own(scenario))
        self.tried: list[Candidate] = [self.own]
        self.refused: dict[Candidate, str] = {}
        self.illegal: dict[Point, str] = {}
        self._run = run

    def go(self, trials: int | None, tell: Tell) -> None:
        every = self.space.every()
        most = trials or (TRIALS if self.space.points is None else len(self.space.points))
        listed = [] if every is None else list(islice(every, most + 1))
        if listed and len(listed) <= most:
            self._listed(listed, tell)
        else:
            self._sampled(most, tell)

    # --- which points ------

    def _listed(self, points: list[Point], tell: Tell) -> None:
        self._round(points, tell)
        known = {point for points in self.study.rounds(self.space) for point in points}
        for point in points:
            if point not in known:
                self.study.note(self.space, point, self._values(point))

    def _sampled(self, trials: int, tell: Tell) -> None:
        for points in self.study.rounds(self.space):  # of an earlier life, whose runs are kept
            self._round(points, tell)
        barren = BARREN * trials
        while self.study.done() < barren and (left := trials - self._legal()) > 0:
            asked = self.study.ask(self.space, min(ROUND, left))
            self._round([point for _, point in asked], tell)
            for trial, point in asked:
                self._tell(trial, point)

    def _legal(self) -> int:
        return len(self.tried) - 1

    def _tell(self, trial: optuna.Trial, point: Point) -> None:
        values = self._values(point)
        if values is None:
            self.study.tell(trial, None, {"legal": 1.0})
            return
        limit = self.budgets.nonstationarity
        figures = self.figures(self._at(point))
        unrest = sum(f[UNREST] for f in figures) / len(figures)
        self.study.tell(trial, values, {UNREST: unrest - limit})

    def _at(self, point: Point) -> Candidate:
        return next(one for one in self.tried if one.point == point)

    # --- running them ------

    def _round(self, points: Sequence[Point], tell: Tell) -> None:
        new = self._candidates(points)
        first = self.seeds[:FIRST]
        self.run([self.own, *new], first, tell)
        if len(self.figures(self.own)) < len(first):
            raise ForgeError(f"{self.scenario.name}: its own policy came to nothing: {self._failure(self.own)}")
        self.tried += new
        runs = {one: self.figures(one)[: len(first)] for one in self.tried}
        met = {one: theirs for one, theirs in runs.items() if len(theirs) == len(first)}
        for one in new:
            if one not in met:
                self.refused[one] = f"it came to nothing: {self._failure(one)}"
            elif why := hopeless(one, met, self.own, self.budgets.nonstationarity):
                self.refused[one] = f"dropped: {why}"
        kept = [one for one in new if one not in self.refused]
        self.run([self.own, *kept], self.seeds, tell)
        for one in kept:
            if len(self.figures(one)) < len(self.seeds):
                self.refused[one] = f"it came to nothing: {self._failure(one)}"

    def _candidates(self, points: Sequence[Point]) -> list[Candidate]:
        """Those of the points that are new, and scenarios within the lag budget."""
        new: list[Candidate] = []
        seen = {one.point for one in self.tried}
        for point in points:
            if point in seen or point in self.illegal:
                continue
            seen.add(point)
            try:
                new.append(candidate(self.scenario, point))
            except ForgeError as error:
                self.illegal[point] = str(error).splitlines()[0].removeprefix(f"{self.scenario.name}: ")
        return new

    def run(self, those: Sequence[Candidate], seeds: Sequence[int], tell: Tell) -> None:
        """Make the runs that are missing, and keep each as it ends."""
        wanted = [(one, seed) for seed in seeds for one in those if self.study.outcome(one, seed) is None]
        done, total = 0, len(wanted)
        tell(0, total)
        for seed, outcomes in self._run(split(self.scenario, wanted)) if wanted else ():
            for one, outcome in outcomes.items():
                self.study.keep(one, seed, outcome)
            done += len(outcomes)
            tell(done, total)

    def figures(self, one: Candidate, seeds: Sequence[int] | None = None) -> tuple[Figures, ...]:
        """Of the runs there are, in the order of the seeds, up to the first that came to nothing."""
        found: list[Figures] = []
        for seed in self.seeds if seeds is None else seeds:
            outcome = self.study.outcome(one, seed)
            if outcome is None or isinstance(outcome, str):
                break
            found.append(outcome)
        return tuple(found)

    def _failure(self, one: Candidate) -> str:
        told = (self.study.outcome(one, seed) for seed in self.seeds)
        return next((outcome for outcome in told if isinstance(outcome, str)), "no run")

    def _values(self, point: Point) -> tuple[float, ...] | None:
        """Objectives as differences to the scenario's own policy on the same seeds, so that candidates that were
        dropped early are comparable; devices last."""
        if point in self.illegal:
            return None
        one = self._at(point)
        pairs = list(zip(self.figures(one), self.figures(self.own), strict=False))
        if not pairs or any(key not in figures for pair in pairs for figures in pair for key in OBJECTIVES):
            return None
        gains = (sum(a[key] - b[key] for a, b in pairs) / len(pairs) for key in OBJECTIVES)
        return (*gains, float(one.devices))
