"""`forge blackbox`: agent programs of others as rollout workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from forge.cli import app
from forge.cli.options import AsJson, print_json
from forge.types import ForgeError

if TYPE_CHECKING:
    from forge.blackbox.launcher import Gateway, Played

blackbox = typer.Typer(
    help="Agent programs of others, run unchanged: install them, look at their recipes, run one on a task. To train on "
    "what one does, name its recipe as the agent of one of a scenario's domains: agent = 'openai-agents'.",
    no_args_is_help=True,
)
app.add_typer(blackbox, name="blackbox")

Names = Annotated[list[str] | None, typer.Argument(help="Programs; without any, all of them.", show_default=False)]


@blackbox.command()
def install(names: Names = None) -> None:
    """Programs from their registries, each in a folder of its own under engines/blackbox. One that is there is kept;
    one that fails is told, and the others go on. All of them: 15 minutes, 5 GB."""
    from forge.blackbox.install import install as put
    from forge.blackbox.install import named
    from forge.blackbox.recipe import program_folder

    console, failed = Console(), []
    for name, program in named(names or ()).items():
        try:
            put(program_folder(name), name, program, lambda said: console.print(said, highlight=False))
            console.print(f"{name} {program.version} is installed", highlight=False)
        except ForgeError as error:
            failed.append(f"{name}: {error}")
            console.print(f"{name}: failed", highlight=False)
    if failed:
        raise ForgeError("\n".join(failed))


@blackbox.command("list")
def list_(as_json: AsJson = False) -> None:
    """Programs with their versions and whether they are installed, and the recipes that ship for each."""
    from forge.blackbox.catalog import PROGRAMS
    from forge.blackbox.install import is_installed
    from forge.blackbox.recipe import load, program_folder, shipped

    recipes = {name: load(path).program for name, path in shipped().items()}
    rows = [
        {
            "program": name,
            "version": program.version,
            "installed": is_installed(program_folder(name), program),
            "recipes": [recipe for recipe, of in recipes.items() if of == name],
        }
        for name, program in PROGRAMS.items()
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        there = "installed" if row["installed"] else "-"
        print(f"{row['program']:<16} {row['version']:<10} {there:<10}", *cast(list[str], row["recipes"]))


@blackbox.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A recipe's file, or the name of one that ships.")],
    url: Annotated[str, typer.Option(help="The gateway, as `forge serve` prints it.")] = "http://127.0.0.1:8000",
    domain: Annotated[str, typer.Option(help="Where the task is from.")] = "coding",
    index: Annotated[int, typer.Option(min=0, help="Which of its validation tasks.")] = 0,
    name: Annotated[str, typer.Option(help="Of the trajectory.")] = "blackbox-0",
    model: Annotated[
        str, typer.Option(help="What the program is to ask for; the gateway serves its one model.")
    ] = "forge",
    key: Annotated[
        str, typer.Option(help="What it is to show as an API key: an access token, where those are asked for.")
    ] = "forge",
    report: Annotated[bool, typer.Option(help="Tell the gateway how it ended.")] = True,
    as_json: AsJson = False,
) -> None:
    """Run a program on one task against a gateway that is up, in a sandbox, and say what came of it."""
    from dataclasses import asdict

    from forge.blackbox.launcher import Gateway

    played = asyncio.run(_run(recipe, Gateway(url=url, model=model, key=key), domain, index, name, report))
    if as_json:
        print_json(asdict(played))
        return
    result, outcome = played.result, played.outcome
    if result is not None:
        print(result.output.rstrip())
        print(f"exit code {result.exit_code}, {result.seconds:.1f} s")
    print(f"reward {outcome.reward:g}" if outcome.reward is not None else f"died: {outcome.reason}, {outcome.detail}")


async def _run(recipe: str, gateway: Gateway, domain: str, index: int, name: str, report: bool) -> Played:
    from forge.agents.loop import ToolClock
    from forge.blackbox.launcher import Launch
    from forge.blackbox.recipe import load
    from forge.blackbox.reporting import tell
    from forge.domains.registry import get_domain
    from forge.sections import ToolWait

    chosen = get_domain(domain)
    chosen.warm_up()
    task = chosen.task("validation", 0, index)
    played = await Launch(load(recipe), gateway, name, chosen, task, ToolClock(ToolWait(), name)).play()
    if report:
        await tell(gateway, played.outcome)
    return played
