"""Where a window of 0.3 N is right, where it is wrong and by how much: fixed windows, the adaptive one, and the escape.

    .venv/bin/python reports/window_sensitivity.py [--quick] [--seeds 5] [--items 240] [--out DIR]

Simulates every family of rollouts under every scheduler over the same seeds, on two processes, and writes
reports/window_sensitivity/ (results.json, results.md, front.png, stall.png). Half an hour; --quick is a smoke test.
With --pages-only the pages are made again from results.json.
Nothing is tuned on the seeds reported (100 and up): the adaptive window's rule was chosen on seeds 0 to 2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # a worker imports the runs by name

from window_sensitivity_pages import write_markdown, write_plots  # noqa: E402
from window_sensitivity_runs import BATCH, MIXES, SHAPES, Candidate, Family, Figures, Rollouts, run  # noqa: E402

from forge.metrics.intervals import mean_interval  # noqa: E402

CONCURRENCIES, LOAD = (8, 16), 0.8
#: N over C: every slot's item holds a place in the queue; places for as many finished ones; for three times as many
NS = (1, 2, 4)
FRACTIONS = (0.0, 0.1, 0.3, 0.5, 1.0)
FIRST_SEED = 100
#: E, minutes, X: parked three minutes after submission, gone when 64 positions behind
ESCAPE = (4, 3.0, 64)
WITH_ESCAPE = ("heavy tail", "fifty")

Task = tuple[Family, int, int, list[Candidate]]
Result = tuple[Family, Candidate, int, Figures]


def families(*, quick: bool) -> list[Family]:
    shapes = ("fifty",) if quick else SHAPES
    mixes = MIXES[:1] if quick else MIXES
    slots = CONCURRENCIES[-1:] if quick else CONCURRENCIES
    return [Family(shape, mix, c, LOAD) for shape in shapes for mix in mixes for c in slots]


def candidates(family: Family, *, quick: bool) -> list[Candidate]:
    """Fixed windows; the adaptive one under the lag budget of the widest and of 0.3 N; both with the escape."""
    found = []
    for n in (family.concurrency * over for over in ((2,) if quick else NS)):
        widest, usual = 2 * n - 2, n + int(0.3 * n) - 2
        found += [Candidate(n, f, widest) for f in ((0.0, 0.3, 1.0) if quick else FRACTIONS)]
        found += [Candidate(n, None, budget) for budget in (widest, usual)]
        if family.shape in WITH_ESCAPE and n - ESCAPE[0] >= BATCH:
            found += [Candidate(n, 0.3, widest, ESCAPE), Candidate(n, None, widest + ESCAPE[2], ESCAPE)]
    return found


def run_task(task: Task) -> list[Result]:
    family, seed, items, mine = task
    work = Rollouts(family, seed)
    return [(family, candidate, seed, run(family, candidate, seed, items, work)) for candidate in mine]


def run_all(tasks: Sequence[Task], processes: int) -> Iterator[list[Result]]:
    if processes == 1:
        yield from map(run_task, tasks)
        return
    with get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(run_task, tasks)


def sweep(seeds: Sequence[int], items: int, *, quick: bool, processes: int) -> list[dict[str, Any]]:
    """One row a family and candidate: figures of every seed, in the seeds' order, and their 95% intervals."""
    tasks: list[Task] = []
    for family in families(quick=quick):
        mine = candidates(family, quick=quick)
        tasks += [(family, seed, items, mine[i : i + 3]) for seed in seeds for i in range(0, len(mine), 3)]
    runs: dict[tuple[Family, Candidate], dict[int, Figures]] = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"{sum(len(t[3]) for t in tasks)} runs", total=len(tasks))
        for results in run_all(tasks, processes):
            for family, candidate, seed, figures in results:
                runs.setdefault((family, candidate), {})[seed] = figures
            progress.advance(bar)
    order = [(f, c) for f in families(quick=quick) for c in candidates(f, quick=quick)]
    return [_row(family, candidate, [runs[family, candidate][s] for s in seeds]) for family, candidate in order]


def _row(family: Family, candidate: Candidate, runs: list[Figures]) -> dict[str, Any]:
    return {
        "family": family.name,
        **asdict(family),
        "name": candidate.name,
        **asdict(candidate),
        "figures": {key: mean_interval([r[key] for r in runs]).to_dict() for key in runs[0]},
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one family, two seeds, few items")
    parser.add_argument("--pages-only", action="store_true", help="from the results that are there")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--items", type=int, default=240)
    parser.add_argument("--out", type=Path, default=HERE / "window_sensitivity")
    given = parser.parse_args(arguments)
    if given.pages_only:
        pages(json.loads((given.out / "results.json").read_text(encoding="utf-8")), given.out)
        return
    count, items = (2, 64) if given.quick else (given.seeds, given.items)
    seeds = range(FIRST_SEED, FIRST_SEED + count)
    rows = sweep(seeds, items, quick=given.quick, processes=1 if given.quick else 2)
    given.out.mkdir(parents=True, exist_ok=True)
    result = {"seeds": list(seeds), "items": items, "batch": BATCH, "escape": ESCAPE, "rows": rows}
    (given.out / "results.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    pages(result, given.out)


def pages(result: dict[str, Any], out: Path) -> None:
    write_markdown(result, out / "results.md")
    write_plots(result["rows"], out)
    print(out / "results.md")


if __name__ == "__main__":
    main()
