"""Commands that need no torch: sim, replay, report, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from forge import scenario as scenarios
from forge import trace as ev
from forge.cli import app
from forge.cli.options import RUNS, AsJson, PolicyFile, RunArg, Runs, ScenarioArg, Sets, print_json
from forge.scenario import Scenario
from forge.slips import slips
from forge.types import ForgeError, Json

if TYPE_CHECKING:
    from forge.runs import RunFolder


@app.command()
def sim(
    scenario: ScenarioArg,
    sets: Sets = None,
    policy: PolicyFile = None,
    runs: Runs = RUNS,
    no_trace: Annotated[
        bool, typer.Option("--no-trace", help="Keep no events: summary, report and a capacity plan of a long run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario; writes the same run folder as a live run. Exit 2 where nothing was trained."""
    from forge.cli.finish import check_trained, show_headline

    loaded = scenarios.load(scenario, sets or (), policy)
    warn_of(loaded)
    folder, summary, planned = _streamed(loaded, runs) if no_trace else _traced(loaded, runs)
    if as_json:
        print_json(summary)
    else:
        show_headline(Console(), folder, summary)
        print(planned, end="")
    check_trained(summary, loaded)


def _streamed(scenario: Scenario, runs: Path) -> tuple[RunFolder, Json, str]:
    """Without events; and the capacity plan."""
    from forge.cli import campaign

    try:
        return campaign.run(scenario, runs)
    except KeyboardInterrupt:
        raise _stopped("a run with --no-trace keeps nothing before its end") from None


def _traced(scenario: Scenario, runs: Path) -> tuple[RunFolder, Json, str]:
    from forge.cli.finish import finish
    from forge.runs import RunFolder
    from sim.world import simulate

    folder = RunFolder.create(runs, scenario)
    writer = ev.TraceWriter(folder.trace)
    try:
        simulate(scenario, (writer,))
    except KeyboardInterrupt:
        raise _stopped(f"{folder.path} holds what was simulated so far, for forge report and forge export") from None
    finally:
        writer.close()
    return folder, finish(folder), ""


def warn_of(scenario: Scenario) -> None:
    for line in slips(scenario):
        print(f"warning: {line}", file=sys.stderr)


def _stopped(what: str) -> typer.Exit:
    print(f"stopped: {what}", file=sys.stderr)
    return typer.Exit(130)


@app.command("compile")
def compile_core() -> None:
    """Compile the simulator's core to C: the same results, long simulations in half the time. Once, two minutes."""
    from forge import compiled

    with Console(stderr=True).status("compiling the simulator's core: two minutes"):
        made = compiled.build()
    print(made)


@app.command()
def replay(run: RunArg, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Repeat every traced policy call on fresh policies, fold the trace again; exit 1 at the first difference."""
    from dataclasses import asdict

    from forge.replay import replay
    from forge.runs import RunFolder

    result = replay(RunFolder.open(run, runs))
    if as_json:
        print_json(asdict(result))
    elif result.difference is None:
        print(f"same: {result.events} events, {result.calls} policy calls, {result.lives} lives")
        if not result.ended:
            print("the trace has no end: the run was killed, or still goes on")
    else:
        print(result.difference)
    if result.difference is not None:
        raise typer.Exit(1)


@app.command()
def report(
    run: Annotated[list[str], typer.Argument(help="One run for its report; several for a comparison.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Folder of a comparison; by default comparison/.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Write report.html of a run again, or compare several runs by policy."""
    from forge.cli.finish import warn
    from forge.metrics import summarise
    from forge.report.comparison import write_comparison
    from forge.report.page import write_report
    from forge.runs import RunFolder

    folders = [RunFolder.open(r, runs) for r in run]
    if len(folders) == 1 and out is not None:
        raise ForgeError(f"--out {out}: is for a comparison of several runs; the report of one goes into its folder")
    for folder in folders:
        warn(folder, summarise(folder.events(), folder.scenario()))
    print(write_report(folders[0]) if len(folders) == 1 else write_comparison(folders, out or Path("comparison")))


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run, and what is missing for the rest."""
    from dataclasses import asdict

    from forge.doctor import checks, machine

    found = checks()
    if as_json:
        print_json({"machine": machine(), "checks": [asdict(c) for c in found]})
        return
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "to get it"):
        table.add_column(column)
    for check in found:
        mark = "[green]ok[/]" if check.ok else "[yellow]--[/]"
        table.add_row(mark, check.what, escape(check.found), "" if check.ok else escape(check.fix))
    console = Console()
    console.print(" · ".join(f"{k} {'none' if v is None else v}" for k, v in machine().items()), highlight=False)
    console.print(table)


def need_live() -> None:
    """A clear line where the `live` extra is not installed."""
    import importlib.util

    missing = [
        m
        for m in ("torch", "transformers", "starlette", "uvicorn", "prometheus_client", "openai")
        if not importlib.util.find_spec(m)
    ]
    if missing:
        raise ForgeError(f"this command needs {', '.join(missing)}: pip install 'forge-rl[live]'")
