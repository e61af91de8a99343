"""`forge tune`: search policies and the fleet's shape in the simulator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from forge import scenario as scenarios
from forge.cli import app
from forge.cli.options import AsJson, ScenarioArg, Sets, check_out, print_json
from forge.cli.simulate import warn_of
from forge.scenario import Scenario
from forge.types import ForgeError

if TYPE_CHECKING:
    from sim.space import Space

#: beside the policy: what a killed tuning goes on from
STORE = "tune.journal"
UNCALIBRATED = (
    "Seconds are the scenario's own, not this machine's: `forge calibrate RUN -o calibration.toml` fits them to a live "
    "run, --calibration takes them. What is compared here are policies, not machines."
)


@app.command()
def tune(
    scenario: ScenarioArg,
    out: Annotated[Path, typer.Option("-o", "--out", help="The policy file to write; all else goes beside it.")] = Path(
        "policy.toml"
    ),
    space: Annotated[
        Path | None,
        typer.Option(
            help='TOML of what may vary: key.path = \\[2, 4, 8] or "0.1..0.9"; else \\[tune] of the scenario.'
        ),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--param", help="One more key, e.g. policy.scheduler.fraction=0.1..0.9. Repeatable."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Points to try. By default all of a small space, 60 of a larger one.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=4, help="Simulated seeds: half to choose on, half held out.")] = 10,
    steps: Annotated[
        int, typer.Option(min=0, help="Trainer steps after which a simulated run ends; 0: where the scenario ends.")
    ] = 30,
    sets: Sets = None,
    calibration: Annotated[
        Path | None, typer.Option(help="A \\[sim] section fitted by `forge calibrate` to your machine.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes. By default one a core.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Run on a Ray cluster: its address, `auto` for this machine's, `local` for one here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search policies and fleet in the simulator; write the policy and a report. Killed, the same command goes on.

    By default the window, N and the concurrency vary under the lag budget.
    """
    from sim import tune as tuning
    from sim.tune_files import to_dict, write

    loaded = scenarios.load(scenario, sets or (), calibration=calibration, tuning=True)
    warn_of(loaded)
    check_out(out)
    told = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    Console(stderr=True).print(f"tuning {loaded.name} in simulation, on {seeds} seeds: minutes", style="dim")
    tuned = tuning.tune(
        _shortened(loaded, steps),
        space=_space(loaded, space, params or ()),
        seeds=range(seeds),
        trials=trials,
        workers=workers,
        ray=ray,
        store=out.with_name(STORE),
    )
    written = write(tuned, out, told, note="" if calibration else UNCALIBRATED)
    if as_json:
        print_json(to_dict(tuned, told))
        return
    console = Console()
    if tuned.kept:
        console.print(f"went on from {tuned.kept} runs in {out.with_name(STORE)}", highlight=False)
    console.print(tuned.why(), highlight=False, markup=False)
    if calibration is None:
        console.print(UNCALIBRATED, style="dim", highlight=False)
    console.print(f"wrote {', '.join(str(p) for p in written)}", highlight=False)


def _shortened(scenario: Scenario, steps: int) -> Scenario:
    """Ending after so many trainer steps, if it does not end before."""
    if not steps or (scenario.stop.steps or steps + 1) <= steps:
        return scenario
    return scenario.model_copy(update={"stop": scenario.stop.model_copy(update={"steps": steps})})


def _space(scenario: Scenario, path: Path | None, params: Sequence[str]) -> Space | None:
    """What was written down; a key given with --param counts. None where nothing was."""
    from sim.space_text import from_params, from_table, space_of

    if path is not None:
        written = from_table(scenarios.read_toml(path), str(path))
        if not written:
            raise ForgeError(f"{path}: nothing may vary; name keys, for example policy.scheduler.fraction = '0.1..0.9'")
    else:
        written = from_table(scenario.tune, f"{scenario.name}: [tune]")
    written |= from_params(params)
    return space_of(written, scenario) if written else None
