"""Tune the window, N and the concurrency in simulation: sweep, judge, choose, write the policy."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from forge.policies import Policies
from forge.scenario import Scenario, policy_toml
from forge.types import ForgeError
from sim.candidates import FRACTIONS, Candidate, candidates
from sim.choose import Budgets, Choice, Judged, choose, judge
from sim.measure import Figures
from sim.sensitivity import plot
from sim.sweep import run_all, split


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of a sweep. `scenario` has the chosen policy and queue numbers."""

    scenario: Scenario
    choice: Choice
    judged: list[Judged]
    seeds: tuple[int, ...]
    budgets: Budgets

    def why(self) -> str:
        """How the policy was chosen, in a few lines."""
        chosen, budgets = self.choice.chosen, self.budgets
        unrest = chosen.figures["nonstationarity"]
        c, speed = chosen.candidate, chosen.figures["trained_tokens_per_s"]
        limit = "none" if budgets.lag_items is None else f"{budgets.lag_items} items"
        lines = [
            f"Tuned in simulation on scenario {self.scenario.name!r}, seeds {_span(self.seeds)}: "
            f"W = {c.window} of N = {c.n}, concurrency {c.concurrency}.",
            f"Trained tokens/s {speed.mean:.4g} [{speed.low:.4g}, {speed.high:.4g}] (95% over seeds), lag at most "
            f"{c.lag_bound} items, non-stationarity {unrest.mean:.2f} "
            f"[{unrest.low:.2f}, {unrest.high:.2f}] (1 is random order).",
            f"Objective: most trained tokens/s with non-stationarity's upper bound <= "
            f"{budgets.nonstationarity:g} (strict order, W = 1, meets it by right) and lag budget {limit}; of "
            f"{self.choice.tied} that tie with the fastest (of {self.choice.feasible} feasible, {len(self.judged)} "
            f"tried): least non-stationary, smallest lag.",
        ]
        if all(j.candidate.window == 1 for j in self.judged if j.feasible):
            lines.append(
                f"Only strict order was left to choose from: every window above 1 is over a budget, judged on "
                f"{len(self.seeds)} seeds; more seeds (--seeds) narrow the bounds."
            )
        return "\n".join(lines)


def tune(
    scenario: Scenario,
    *,
    seeds: Sequence[int] = tuple(range(5)),
    fractions: Sequence[float] = FRACTIONS,
    ns: Sequence[int] | None = None,
    concurrencies: Sequence[int] | None = None,
    max_nonstationarity: float = 1.0,
    workers: int | None = None,
    console: Console | None = None,
) -> Tuned:
    """Sweep and choose. Every candidate meets the same work, seed by seed. `workers` None: one per core.

    Raises ForgeError for fewer than two seeds, a lag budget that leaves no candidate, or runs too short to be judged.
    """
    if len(set(seeds)) < 2:
        raise ForgeError(f"seeds = {list(seeds)}: give at least two different ones; one has no confidence interval")
    budgets = Budgets(nonstationarity=max_nonstationarity, lag_items=scenario.queue.lag_budget)
    swept = candidates(scenario, fractions, ns, concurrencies)
    runs: dict[Candidate, dict[int, Figures]] = {c: {} for c in swept}
    tasks = split(scenario, swept, seeds)
    with Progress(console=console or Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"simulating {len(swept)} candidates x {len(seeds)} seeds", total=len(tasks))
        for seed, figures in run_all(tasks, workers or os.cpu_count() or 1):
            for candidate, values in figures.items():
                runs[candidate][seed] = values
            progress.advance(bar)
    ordered = {c: tuple(by_seed[s] for s in seeds) for c, by_seed in runs.items()}
    judged = judge(ordered, scenario.queue.batch, budgets, scenario.efficiency)
    choice = choose(judged)
    return Tuned(choice.chosen.candidate.of(scenario), choice, judged, tuple(seeds), budgets)


def write(tuned: Tuned, policy: Path) -> list[Path]:
    """`policy` itself, and beside it `tune.json` and `sensitivity.png`."""
    policy.parent.mkdir(parents=True, exist_ok=True)
    queue = {"n": tuned.scenario.queue.n, "concurrency": tuned.scenario.queue.concurrency}
    chosen: Policies = tuned.scenario.policy
    policy.write_text(policy_toml(chosen, queue, tuned.why()), encoding="utf-8")
    table, picture = policy.with_name("tune.json"), policy.with_name("sensitivity.png")
    table.write_text(json.dumps(to_dict(tuned), indent=2) + "\n", encoding="utf-8")
    best = tuned.choice.chosen
    title = (
        f"{tuned.scenario.name}: W = {best.candidate.window} of N = {best.candidate.n} chosen; bands: 95% over seeds"
    )
    plot(tuned.judged, best, title, picture)
    return [policy, table, picture]


def to_dict(tuned: Tuned) -> dict[str, Any]:
    by_j = tuned.choice.by_j
    return {
        "scenario": tuned.scenario.name,
        "seeds": list(tuned.seeds),
        "objective": tuned.why(),
        "budgets": {"nonstationarity": tuned.budgets.nonstationarity, "lag_items": tuned.budgets.lag_items},
        "sample_efficiency": tuned.scenario.efficiency.model_dump(mode="json"),
        "chosen": _row(tuned.choice.chosen),
        "best_by_j": None if by_j is None else _row(by_j),
        "best_by_j_reason": "its interval lies above all others" if by_j else "intervals overlap: no winner by J",
        "candidates": [_row(j) for j in tuned.judged],
    }


def _row(judged: Judged) -> dict[str, Any]:
    c = judged.candidate
    return {
        "n": c.n,
        "concurrency": c.concurrency,
        "window": c.window,
        "fraction": c.fraction,
        "lag_items_bound": c.lag_bound,
        "feasible": judged.feasible,
        "infeasible_reason": judged.reason,
        "pareto": judged.pareto,
        "figures": {key: value.to_dict() for key, value in judged.figures.items()},
        "j_interval": None if judged.j is None else list(judged.j),
    }


def _span(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds)) if len(seeds) < 10 else f"{seeds[0]}..{seeds[-1]} ({len(seeds)})"
