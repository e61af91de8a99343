"""Does the simulator predict the order of the four train schedulers? Live runs of each over several seeds.

    .venv/bin/python reports/schedulers.py [--seeds 3] [--seconds 45]

Probes the machine once, fits the simulator to it, writes the prediction of every run before that run starts, runs them
live one after another, and compares. Writes reports/schedulers/ (comparison.html, comparison.png, comparison.json) and
keeps the run folders under runs/schedulers/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

SCHEDULERS = ("strict_fifo", "windowed_fifo", "greedy", "fffo")
HERE = Path(__file__).parent


def main() -> None:
    from forge import scenario as scenarios
    from forge.cli.live import train
    from forge.cli.quickstart import probe
    from forge.report.comparison import write_comparison
    from forge.runs import RunFolder
    from sim.predict import predict

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=45.0)
    given = arguments.parse_args()
    console = Console()
    runs = Path("runs/schedulers")
    base = [f"stop.seconds={given.seconds}", "eval.tasks=0"]
    probed = scenarios.load("quickstart", base)
    calibrated = probe(probed, RunFolder.create(runs / "probe", probed), console).sim
    folders = []
    # Seed by seed, so that a machine that drifts drifts for all four alike.
    for seed in range(given.seeds):
        for kind in SCHEDULERS:
            settings = [*base, f"seed={seed}", f"policy.scheduler.kind={kind}"]
            scenario = scenarios.load("quickstart", settings).model_copy(update={"sim": calibrated})
            folder = RunFolder.create(runs, scenario)
            folder.write("prediction.json", predict(scenario, [seed, *range(100, 104)]))
            console.print(f"[bold]{kind}, seed {seed}[/]")
            train(folder, console, resume=False)
            folders.append(folder)
    print(write_comparison(folders, HERE / "schedulers"))


if __name__ == "__main__":  # child processes of a live run import this file again
    main()
