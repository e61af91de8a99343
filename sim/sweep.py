"""Running candidates on seeds: over all cores, or over a Ray cluster. Apart from `tune`, so that workers load no
plotting."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context

from forge.processes import belong_to
from forge.scenario import Scenario
from forge.types import ForgeError
from sim.candidates import Candidate
from sim.measure import Figures, measure
from sim.predict import with_seed
from sim.workload import work_of
from sim.world import SimError, simulate

SLICE = 4  # candidates per task: few enough to share out evenly, enough to draw their common work only once

Outcome = Figures | str  # str: why the run came to nothing
Task = tuple[Scenario, int, tuple[Candidate, ...]]
Result = tuple[int, dict[Candidate, Outcome]]
Run = Callable[[Sequence[Task]], Iterator[Result]]  # in any order; figures depend on nothing but the task


def split(scenario: Scenario, wanted: Sequence[tuple[Candidate, int]]) -> list[Task]:
    """Runs to make, as tasks of one seed each."""
    by_seed: dict[int, list[Candidate]] = {}
    for one, seed in wanted:
        by_seed.setdefault(seed, []).append(one)
    return [
        (scenario, seed, tuple(those[i : i + SLICE]))
        for seed, those in by_seed.items()
        for i in range(0, len(those), SLICE)
    ]


@contextmanager
def runner(workers: int, ray: str | None = None) -> Iterator[Run]:
    """`ray`: the address of a cluster, `auto` for the one this machine belongs to, `local` for a new one here."""
    if ray is not None:
        from sim.ray_pool import on_ray

        with on_ray(ray) as run:
            yield run
    elif workers == 1:
        yield lambda tasks: map(run_task, tasks)
    else:
        # spawn: a forked child would inherit the threads and locks of whatever called us
        pool = get_context("spawn").Pool(workers, initializer=belong_to, initargs=(os.getpid(),))
        try:
            yield lambda tasks: pool.imap_unordered(run_task, tasks)
        finally:  # Ctrl-C included: a task may take a minute, and nobody wants its figures any more
            pool.terminate()
            pool.join()


def run_task(task: Task) -> Result:
    """Some candidates on one seed's work."""
    scenario, seed, wanted = task
    scenario = with_seed(scenario, seed)
    work = work_of(scenario)
    outcomes: dict[Candidate, Outcome] = {}
    for one in wanted:
        mine = one.of(scenario)
        try:
            outcomes[one] = measure(simulate(mine, work=work).events, mine)
        except (ForgeError, SimError) as error:
            outcomes[one] = str(error)
    return seed, outcomes
