"""Tune policies and the fleet's shape in simulation: search, judge, choose, and ask seeds that the choice never saw."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forge.scenario import Scenario
from forge.types import ForgeError
from sim.candidates import Candidate, default_space
from sim.certainty import again
from sim.choose import SPEED, UNREST, Budgets, Choice, Judged, choose, judge
from sim.search import Search, Tell
from sim.space import Space
from sim.study import Study
from sim.sweep import runner
from sim.validate import Validation, validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The result of tuning. `scenario` has the policy that is adopted: the chosen one, or the scenario's own where
    held-out seeds do not show it to be better. `seeds`: those it was chosen on. `again`: who is chosen when the seeds
    are drawn anew, and how often. `illegal`: points that are no scenario within the lag budget. `kept`: runs that an
    earlier life had made. `own_n_follows`: the scenario derives N from its lag budget; what is tuned is a number."""

    scenario: Scenario
    space: Space
    choice: Choice
    own: Judged
    judged: list[Judged]
    illegal: int
    seeds: tuple[int, ...]
    budgets: Budgets
    validation: Validation
    again: list[tuple[Judged, float]]
    kept: int
    own_n_follows: bool

    @property
    def adopted(self) -> Judged:
        return self.choice.chosen if self.validation.adopt else self.own

    def why(self) -> str:
        """How the policy was chosen, in a few lines."""
        chosen, budgets = self.choice.chosen, self.budgets
        speed, unrest = chosen.figures[SPEED], chosen.figures[UNREST]
        c = chosen.candidate
        bound = "unbounded" if c.lag_bound is None else f"at most {c.lag_bound} items"
        limit = "none" if budgets.lag_items is None else f"{budgets.lag_items} items"
        window = "no window" if c.window is None else f"W = {c.window}"
        lines = [
            f"Tuned in simulation on scenario {self.scenario.name!r}, seeds {span(self.seeds)}: "
            f"{window} of N = {c.n}, concurrency {c.concurrency}{self._more(c)}.",
            f"Trained tokens/s {speed.mean:.4g} [{speed.low:.4g}, {speed.high:.4g}] (95% over seeds), lag "
            f"{bound}, non-stationarity {unrest.mean:.2f} "
            f"[{unrest.low:.2f}, {unrest.high:.2f}] (1 is random order).",
            f"Objective: most trained tokens/s with non-stationarity's upper bound <= "
            f"{budgets.nonstationarity:.4g} (strict order, W = 1, meets it by right; so does the scenario's own policy "
            f"where it is not shown to exceed it, and what is no more so) and lag budget {limit}; of "
            f"{self.choice.tied} that tie with the fastest (of {self.choice.feasible} feasible, {len(self.judged)} "
            f"tried): {'fewest devices, ' if self.space.varies_fleet else ''}least non-stationary, smallest lag.",
            self.validation.verdict,
        ]
        if all(j.candidate.window == 1 for j in self.judged if j.feasible):
            lines.append(
                f"Only strict order was left to choose from: every window above 1 is over a budget, judged on "
                f"{len(self.seeds)} seeds; more seeds (--seeds) narrow the bounds."
            )
        return "\n".join(lines)

    def _more(self, chosen: Candidate) -> str:
        """The keys that a window, N and a concurrency do not tell."""
        told = ("policy.scheduler.", "queue.")
        return "".join(f", {path} = {value}" for path, value in chosen.point if not path.startswith(told))


def tune(
    scenario: Scenario,
    *,
    space: Space | None = None,
    seeds: Sequence[int] = tuple(range(10)),
    trials: int | None = None,
    max_nonstationarity: float = 1.0,
    workers: int | None = None,
    ray: str | None = None,
    store: Path | None = None,
    console: Console | None = None,
) -> Tuned:
    """Every candidate meets the same work, seed by seed; the first half of the seeds chooses, the other validates.

    `space` None: window, N and concurrency. `workers` None: one per core; `ray`: a cluster instead. `store`: a file
    from which the same call goes on after a kill. Raises ForgeError for fewer than four seeds, a lag budget that leaves
    no candidate, or runs too short to be judged.
    """
    if len(set(seeds)) < 4:
        raise ForgeError(f"seeds = {list(seeds)}: give at least four different ones: two to choose on, two held out")
    half = (len(seeds) + 1) // 2
    choosing, held_out = tuple(seeds[:half]), tuple(seeds[half:])
    space = space or default_space(scenario)
    budgets = Budgets(nonstationarity=max_nonstationarity, lag_items=scenario.queue.lag_budget)
    with (
        closing(Study(scenario, space, seeds, store)) as study,
        runner(workers or os.cpu_count() or 1, ray) as run,
        _progress(console) as bar,
    ):
        search = Search(scenario, space, choosing, study, run, budgets)
        search.go(trials, _teller(bar, "choosing"))
        judged, budgets = _judged(search, scenario)
        choice, own = choose(judged), judged[0]
        search.run([own.candidate, choice.chosen.candidate], held_out, _teller(bar, "held-out seeds"))
        runs, own_runs = (search.figures(one.candidate, held_out) for one in (choice.chosen, own))
    validation = validate(held_out, choice.chosen, own, runs, own_runs)
    return Tuned(
        scenario=choice.chosen.candidate.of(scenario) if validation.adopt else scenario,
        space=space,
        choice=choice,
        own=own,
        judged=judged,
        illegal=len(search.illegal),
        seeds=choosing,
        budgets=budgets,
        validation=validation,
        again=again(judged),
        kept=study.kept,
        own_n_follows=scenario.queue.n_from_lag_budget,
    )


def _judged(search: Search, scenario: Scenario) -> tuple[list[Judged], Budgets]:
    """The scenario's own policy first. Where nothing is within the budget of non-stationarity, its own policy's upper
    bound is the budget."""
    runs = {one: search.figures(one) for one in search.tried}

    def judge_within(budgets: Budgets) -> list[Judged]:
        return judge(runs, scenario.queue.batch, budgets, scenario.efficiency, search.refused, search.own)

    budgets = search.budgets
    judged = judge_within(budgets)
    unrest = judged[0].figures.get(UNREST)
    if not any(j.feasible for j in judged) and unrest is not None and unrest.high > budgets.nonstationarity:
        budgets = replace(budgets, nonstationarity=unrest.high)
        judged = judge_within(budgets)
    return judged, budgets


def span(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) if len(seeds) < 10 else f"{seeds[0]}..{seeds[-1]} ({len(seeds)})"


def _progress(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console or Console(stderr=True),
        transient=True,
    )


def _teller(bar: Progress, what: str) -> Tell:
    """Runs made of those that this phase is known to need so far."""
    task = bar.add_task(f"simulating, {what}", total=None)
    before, last = 0, (0, 0)

    def tell(done: int, total: int) -> None:
        nonlocal before, last
        if done == 0:
            before, last = before + last[1], (0, total)
        last = (done, total)
        bar.update(task, completed=before + done, total=before + total)

    return tell
