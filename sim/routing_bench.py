"""`forge bench routing`: every router on the same work, cell by cell, over seeds.

A seed is a part of the trace of its own (`sim.routing.part`) and draws of its own; all routers of a cell get the same
parts. So routers are compared by pairs: the interval is that of the mean over seeds of the difference to ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median

from forge import compiled
from forge.metrics.intervals import mean_interval
from forge.types import ForgeError, Json
from sim import routing
from sim.routing import NAMES, OURS, Cell, Outcome, Pace, Size
from sim.sessions import Trace

FIGURES = ("cells", "cells_best", "mean_ttft_gain_median", "worst_cell_gain")
PACED_BY = 0  # the seed on which loads are found; it is not among those reported


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is run. The policy was chosen on other seeds (100 and above)."""

    loads: tuple[float, ...] = (0.6, 0.8, 0.95)
    routers: tuple[int, ...] = (1, 4)
    signals_s: tuple[float, ...] = (0.1, 1.0)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    size: Size

    def cells(self, workload: str) -> list[Cell]:
        return [
            Cell(workload=workload, load=load, routers=routers, signal_s=signal_s)
            for load, routers, signal_s in product(self.loads, self.routers, self.signals_s)
        ]


FULL = Grid(size=Size())
QUICK = Grid(loads=(0.8,), signals_s=(1.0,), seeds=(1, 2), size=Size(keep=0.1, sessions=24, requests=20))

Job = tuple[Cell, str, int, Pace, Size]
Found = Mapping[tuple[Cell, str, int], Outcome]


def run(data: Path | None, grid: Grid, tell: Callable[[int, int], None]) -> Json:
    """`figures`, `reasons` of those that are null, `rows` (a cell each), `paces`, `protocol` in words. `tell`: runs
    done and of how many. Raises ForgeError where --data is no folder."""
    if data is not None and not data.is_dir():
        raise ForgeError(f"--data {data}: no such folder")
    absent = {name: _absent(data, name) for name in routing.FILES}
    present = [name for name, reason in absent.items() if reason is None]
    why = compiled.ensure() if present else None
    rows: list[Json] = []
    paces: Json = {}
    if data is not None and present:
        rows, paces = _measure(data, present, grid, tell)
    lacking = "; ".join(reason for reason in absent.values() if reason is not None)
    return {
        "protocol": _protocol(grid) + ("" if why is None else f"; core interpreted: {why}"),
        "figures": figures(rows),
        "reasons": {} if present else dict.fromkeys(FIGURES, lacking),
        "left_out": {name: reason for name, reason in absent.items() if reason is not None},
        "paces": paces,
        "rows": rows,
    }


def _absent(data: Path | None, workload: str) -> str | None:
    name, source = routing.FILES[workload]
    if data is not None and (data / name).is_file():
        return None
    place = "no --data folder" if data is None else f"{data / name}: absent"
    return f"{place}; {name} is to be had from {source}"


# --- running ------

_TRACES: dict[str, Trace] = {}  # of a worker


def _begin(data: Path, workloads: Sequence[str]) -> None:
    for workload in workloads:
        _TRACES[workload] = routing.load(workload, data)


def _paced(workload: str, grid: Grid) -> tuple[float, dict[float, Pace]]:
    return routing.paces(workload, _TRACES[workload], grid.loads, grid.size, PACED_BY)


def _job(job: Job) -> Outcome:
    cell, name, seed, pace, size = job
    trace = _TRACES[cell.workload]
    make = routing.routers(trace, cell.routers)[name]
    some = routing.part(cell.workload, trace, seed, size, pace)
    return routing.serve(some, [make() for _ in range(cell.routers)], pace, cell.signal_s, seed)


def _measure(
    data: Path, workloads: Sequence[str], grid: Grid, tell: Callable[[int, int], None]
) -> tuple[list[Json], Json]:
    spawn = get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, _begin, (data, workloads)) as pool:
        paced = dict(zip(workloads, pool.map(_paced, workloads, [grid] * len(workloads)), strict=True))
        jobs: list[Job] = [
            (cell, name, seed, paced[workload][1][cell.load], grid.size)
            for workload in workloads
            for cell in grid.cells(workload)
            for name in NAMES
            for seed in grid.seeds
        ]
        found: dict[tuple[Cell, str, int], Outcome] = {}
        for job, outcome in zip(jobs, pool.map(_job, jobs), strict=True):
            found[job[:3]] = outcome
            tell(len(found), len(jobs))
    rows = [_row(cell, found, grid.seeds) for workload in workloads for cell in grid.cells(workload)]
    told = {
        workload: {
            "most_requests_per_s": most,
            **{f"{load:g}": asdict(pace) for load, pace in by_load.items()},
        }
        for workload, (most, by_load) in paced.items()
    }
    return rows, told


# --- what comes of it ------


def _row(cell: Cell, found: Found, seeds: Sequence[int]) -> Json:
    """Of a cell: every router's means over the seeds, and by how much it is slower than ours, with the 95% bounds."""
    ours = [found[cell, OURS, seed].ttft_s for seed in seeds]
    by_name: Json = {}
    for name in NAMES:
        outcomes = [found[cell, name, seed] for seed in seeds]
        slower = mean_interval([one.ttft_s - own for one, own in zip(outcomes, ours, strict=True)])
        means = {key: fmean(getattr(one, key) for one in outcomes) for key in Outcome.__dataclass_fields__}
        by_name[name] = {**means, "slower_s": slower.to_dict(), "ttft_by_seed_s": [one.ttft_s for one in outcomes]}
    others = [name for name in NAMES if name != OURS]
    best = min(others, key=lambda name: by_name[name]["ttft_s"])
    beaten_by = [name for name in others if (high := by_name[name]["slower_s"]["high"]) is not None and high < 0]
    return {
        **asdict(cell),
        "best_baseline": best,
        "gain": 1.0 - by_name[OURS]["ttft_s"] / by_name[best]["ttft_s"],
        "beaten_by": beaten_by,
        "routers_compared": by_name,
    }


def figures(rows: Sequence[Json]) -> dict[str, float | None]:
    """`cells_best`: in which no baseline has a significantly lower mean TTFT. Gains: against its best baseline."""
    if not rows:
        return dict.fromkeys(FIGURES)
    gains = [row["gain"] for row in rows]
    return {
        "cells": len(rows),
        "cells_best": sum(not row["beaten_by"] for row in rows),
        "mean_ttft_gain_median": median(gains),
        "worst_cell_gain": min(gains),
    }


def _protocol(grid: Grid) -> str:
    size = grid.size
    return (
        f"{routing.INSTANCES} instances of llama_3_1_70b on 8 h100_sxm, KV fetched between them at "
        f"{routing.BANDWIDTH / 1e9:g} GB/s; loads: of the most least_loaded can do, by seed {PACED_BY}; "
        f"reports every and after the signal's seconds; seeds {', '.join(map(str, grid.seeds))}: of Mooncake's "
        f"conversations each with probability {size.keep:g}, {size.sessions} Claude Code sessions to their first "
        f"{size.requests} requests in a closed loop, and the draws; paired by seed, 95% intervals (Student's t)"
    )
