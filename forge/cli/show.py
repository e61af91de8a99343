"""`forge show`: a run's trajectories, and one of them turn by turn."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from forge.cli import app
from forge.cli.options import RUNS, AsJson, RunArg, Runs, print_json
from forge.types import Json, Trajectory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from forge.report.conversation import Decode, Turn

#: columns where no terminal says how many
PIPED = 2000
#: characters of a turn's text that are shown without --whole
SHOWN = 400


@app.command()
def show(
    run: RunArg,
    trajectory: Annotated[
        str | None, typer.Argument(help="POSITION or POSITION.MEMBER, as the list of them says.", show_default=False)
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Every sampled token, its logprob and weights.")] = False,
    whole: Annotated[bool, typer.Option("--whole", help="Texts in full.")] = False,
    last: Annotated[int, typer.Option("--last", min=1, help="How many items the list holds, newest first.")] = 20,
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """Look at what agents did: the trajectories of a live run, or one as a tree of its turns, forks with their reasons,
    rewards and times, to the token."""
    from rich.console import Console

    from forge.report import trajectories
    from forge.runs import RunFolder

    folder = RunFolder.open(run, runs)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)
    with trajectories.reading(folder) as pool:
        if trajectory is None:
            _list(console, trajectories.rows(pool, last), as_json=as_json)
            return
        found = trajectories.find(pool, trajectory)
    if as_json:
        print_json([asdict(one) for one in found.trajectories])
        return
    decode = trajectories.decoder(folder)
    for one in found.trajectories:
        drawn = _tree(trajectories.headline(found.item, one), one, decode, tokens, None if whole else SHOWN)
        console.print(drawn, soft_wrap=True)


def _list(console: Console, rows: list[Json], *, as_json: bool) -> None:
    from rich.table import Table

    if as_json:
        print_json(rows)
        return
    columns = ("trajectory", "domain", "state", "reward", "turns", "sampled", "seconds", "forks", "scaffold")
    table = Table(*columns, box=None)
    for row in rows:
        reward = row["death"] if row["reward"] is None else f"{row['reward']:.2f}"
        forks = ", ".join(f"{kind} {count}" for kind, count in row["forks"].items())
        numbers = [str(row["turns"]), str(row["sampled"]), f"{row['seconds']:.2f}"]
        table.add_row(row["trajectory"], row["domain"], row["state"], str(reward), *numbers, forks, row["scaffold"])
    console.print(table)
    console.print("forge show RUN POSITION.MEMBER shows one of them", style="dim")


def _tree(head: str, one: Trajectory, decode: Decode, tokens: bool, most: int | None) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    from forge.report.conversation import span, tree

    root = Tree(Text(head, style="bold"))
    for turn in tree(one):
        _add(root, turn, decode, span(one), tokens=tokens, most=most)
    return root


def _add(
    node: Tree, turn: Turn, decode: Decode, within: tuple[float, float], *, tokens: bool, most: int | None
) -> None:
    """One turn; where a single one follows, it stands below it and not inside: conversations are long."""
    from rich.text import Text

    from forge.report.conversation import facts, timeline, token_rows

    while True:
        c = turn.completion
        here = node.add(Text(f"{facts(turn)}\n{timeline(c, *within)}", style="cyan"))
        here.add(Text(_cut(decode(turn.new_ids), most), style="dim"))
        if tokens:
            rows = [f"{logprob:8.3f}  {version:4d}  {text!r}" for text, logprob, version in token_rows(c, decode)]
            here.add(Text("\n".join(rows)))
        else:
            here.add(Text(_cut(decode(c.sampled_ids), most)))
        if len(turn.children) != 1:
            break
        turn = turn.children[0]
    for child in turn.children:
        _add(here, child, decode, within, tokens=tokens, most=most)


def _cut(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"
