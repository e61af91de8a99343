"""Running many candidates on many seeds, over all cores. Apart from `tune`, so that workers load no plotting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from multiprocessing import get_context

from forge.processes import belong_to
from forge.scenario import Scenario
from sim.candidates import Candidate
from sim.measure import Figures, measure
from sim.predict import with_seed
from sim.workload import work_of
from sim.world import simulate

SLICE = 4  # candidates per task: few enough to share out evenly, enough to draw their common work only once

Task = tuple[Scenario, int, list[Candidate]]


def split(scenario: Scenario, swept: Sequence[Candidate], seeds: Sequence[int]) -> list[Task]:
    return [(scenario, seed, list(swept[i : i + SLICE])) for seed in seeds for i in range(0, len(swept), SLICE)]


def run_all(tasks: Sequence[Task], workers: int) -> Iterator[tuple[int, dict[Candidate, Figures]]]:
    """In any order; the figures of a task depend on nothing but the task."""
    if workers == 1:
        yield from map(run_task, tasks)
        return
    # spawn: a forked child would inherit the threads and locks of whatever called us
    pool = get_context("spawn").Pool(min(workers, len(tasks)), initializer=belong_to, initargs=(os.getpid(),))
    try:
        yield from pool.imap_unordered(run_task, tasks)
    finally:  # Ctrl-C included: a task may take a minute, and nobody wants its figures any more
        pool.terminate()
        pool.join()


def run_task(task: Task) -> tuple[int, dict[Candidate, Figures]]:
    """Some candidates on one seed's work."""
    scenario, seed, swept = task
    scenario = with_seed(scenario, seed)
    work = work_of(scenario)
    figures: dict[Candidate, Figures] = {}
    for candidate in swept:
        mine = candidate.of(scenario)
        figures[candidate] = measure(simulate(mine, work=work).events, mine)
    return seed, figures
