"""`forge quickstart`: the whole idea in one command.

probe this machine -> fit the simulator -> tune the policy in it -> write down what it predicts -> train live with that
policy -> report prediction beside measurement.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from forge import scenario as scenarios
from forge.cli import app
from forge.cli.options import RUNS, Runs
from forge.cli.simulate import need_live
from forge.runs import RunFolder, write_text
from forge.scenario import Scenario
from forge.types import ForgeError

PROBE_S = 20.0
PREDICTION_SEEDS = range(5)
#: Long enough for tens of steps, short enough that the whole sweep takes seconds.
TUNE_HORIZON_S = 60.0
TUNE_SEEDS = range(8)  # four to choose on, four held out
TUNE_FRACTIONS = (0.0, 0.15, 0.3, 0.5, 1.0)


@app.command()
def quickstart(
    seed: Annotated[int, typer.Option(help="Seed of tasks, sampling and tool waits.")] = 0,
    seconds: Annotated[float, typer.Option(min=10, help="How long to train.")] = 300.0,
    runs: Runs = RUNS,
) -> None:
    """Tune in the simulator, train a small model live for five minutes, compare. Two cores, no GPU, no downloads."""
    need_live()
    from forge.cli.live import train

    console = Console()
    scenario = scenarios.load("quickstart", [f"seed={seed}", f"stop.seconds={seconds}"])
    folder = RunFolder.create(runs, scenario)
    console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    calibrated = probe(scenario, folder, console)
    tuned = tune_policy(calibrated, folder, console)
    folder.write("scenario.resolved.json", scenarios.resolved(tuned))
    predict(tuned, folder, console)
    console.print("[bold]4/4[/] train live with the tuned policy; held-out tasks before and after", highlight=False)
    train(folder, console, resume=False)


def probe(scenario: Scenario, folder: RunFolder, console: Console) -> Scenario:
    """A short live run with learning rate 0 shows what everything costs here, and how long rewarded work is, which is
    what the policy will do; the scenario with a simulator fitted to both."""
    from forge.live.run import run_live
    from sim.calibrate import calibrate, to_toml
    from sim.learnt import as_learnt

    console.print(f"[bold]1/4[/] probe this machine: {PROBE_S:.0f} s of live work, nothing learnt", highlight=False)
    updates = {
        "stop": scenario.stop.model_copy(update={"seconds": PROBE_S}),
        "train": scenario.train.model_copy(update={"lr": 0.0}),
        "eval": scenario.eval.model_copy(update={"tasks": 0}),
    }
    short = RunFolder.create(folder.path / "probe", scenario.model_copy(update=updates))
    if run_live(short.scenario(), short, console, resume=False) == "stopped":
        raise ForgeError("stopped while probing; nothing was trained, start it again")
    short.end_life()
    events = list(short.events())
    fitted = calibrate(events, short.scenario(), source=f"probe/{short.path.name}")
    fitted = as_learnt(fitted, events, scenario)
    write_text(folder.path / "calibration.toml", to_toml(fitted))
    return scenario.model_copy(update={"sim": fitted.sim})


def tune_policy(scenario: Scenario, folder: RunFolder, console: Console) -> Scenario:
    from sim.candidates import default_space
    from sim.tune import tune
    from sim.tune_files import write

    console.print("[bold]2/4[/] tune the train scheduler in the simulator", highlight=False)
    horizon = scenario.stop.model_copy(update={"seconds": TUNE_HORIZON_S})
    short = scenario.model_copy(update={"stop": horizon})
    tuned = tune(short, space=default_space(short, TUNE_FRACTIONS), seeds=TUNE_SEEDS, console=console)
    write(tuned, folder.path / "policy.toml", folder.command())
    console.print(tuned.why(), highlight=False)
    return tuned.scenario.model_copy(update={"stop": scenario.stop})


def predict(scenario: Scenario, folder: RunFolder, console: Console) -> None:
    """Written down before the first training step; the report sets it beside what came."""
    from sim.predict import predict as predict_figures

    prediction = predict_figures(scenario, PREDICTION_SEEDS)
    folder.write("prediction.json", prediction)
    figures = prediction["figures"]
    shown = ("trained_tokens_per_s", "lag_items_max", "engine_idle_fraction", "trainer_idle_fraction")
    text = ", ".join(f"{key} {figures[key]['mean']:.3g}" for key in shown if key in figures)
    console.print(f"[bold]3/4[/] the simulator predicts: {text}", highlight=False)
