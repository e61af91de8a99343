"""`forge show`: a run's trajectories, and one of them turn by turn."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forge.cli import app
from forge.cli.options import RUNS, AsJson, RunArg, Runs, print_json
from forge.types import ForgeError, ItemState, Trajectory

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree

    from forge.gateway.chat import HfChatCodec
    from forge.pool.reader import PoolItem, PoolReader
    from forge.report.conversation import Turn
    from forge.runs import RunFolder

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

    from forge.pool.reader import PoolReader
    from forge.runs import RunFolder

    folder = RunFolder.open(run, runs)
    path = folder.path / "pool.sqlite"
    if not path.is_file():
        raise ForgeError(f"{folder.path}: holds no pool.sqlite; only live runs keep what agents said")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED)
    with PoolReader(path) as pool:
        if trajectory is None:
            _list(console, pool, last, as_json=as_json)
            return
        item, chosen = _find(pool, trajectory)
    if as_json:
        print_json([_plain(one) for one in chosen])
        return
    codec = _codec(folder)
    for one in chosen:
        console.print(_tree(item, one, codec, tokens=tokens, most=None if whole else SHOWN), soft_wrap=True)


def _find(pool: PoolReader, name: str) -> tuple[PoolItem, list[Trajectory]]:
    position, dot, member = name.partition(".")
    if not position.isdecimal() or (dot and not member.isdecimal()):
        raise ForgeError(f"{name}: give POSITION or POSITION.MEMBER, for example 12.3")
    item = pool.item(int(position))
    found = [one for one in pool.trajectories(item.position) if not dot or one.member == int(member)]
    if not found:
        state = f"item {position} is {item.state.value}, with {item.members} members"
        raise ForgeError(f"{name}: no such trajectory has ended; {state}")
    return item, found


def _list(console: Console, pool: PoolReader, last: int, *, as_json: bool) -> None:
    from rich.table import Table

    positions = sorted((p for state in ItemState for p in pool.positions(state)), reverse=True)[:last]
    rows = [_row(pool.item(p), one) for p in positions for one in pool.trajectories(p)]
    if as_json:
        print_json(rows)
        return
    table = Table("trajectory", "domain", "state", "reward", "turns", "sampled", "seconds", "forks", box=None)
    for row in rows:
        reward = row["death"] if row["reward"] is None else f"{row['reward']:.2f}"
        forks = ", ".join(f"{kind} {count}" for kind, count in row["forks"].items())
        numbers = [str(row["turns"]), str(row["sampled"]), f"{row['seconds']:.2f}"]
        table.add_row(row["trajectory"], row["domain"], row["state"], str(reward), *numbers, forks)
    console.print(table)
    console.print("forge show RUN POSITION.MEMBER shows one of them", style="dim")


def _row(item: PoolItem, one: Trajectory) -> dict[str, Any]:
    from forge.report.conversation import span

    begin, end = span(one)
    forks = Counter(c.fork for c in one.completions if c.fork and c.fork != "root")
    return {
        "trajectory": f"{one.position}.{one.member}",
        "domain": item.domain,
        "state": item.state.value,
        "reward": one.outcome.reward,
        "death": one.outcome.reason.value if one.outcome.reason else None,
        "turns": len(one.completions),
        "sampled": sum(len(c.sampled_ids) for c in one.completions),
        "seconds": end - begin,
        "forks": dict(forks),
    }


def _codec(folder: RunFolder) -> HfChatCodec:
    from forge.gateway.chat import HfChatCodec
    from forge.models import resolve

    model = folder.scenario().model
    return HfChatCodec(resolve(model.path), model.tool_prompt)


def _tree(item: PoolItem, one: Trajectory, codec: HfChatCodec, *, tokens: bool, most: int | None) -> Tree:
    from rich.text import Text
    from rich.tree import Tree

    from forge.report.conversation import span, tree

    outcome = one.outcome
    ended = f"reward {outcome.reward:g}" if outcome.reward is not None else f"died: {outcome.reason} {outcome.detail}"
    begin, end = span(one)
    head = (
        f"{one.position}.{one.member}  {item.domain}, difficulty {item.difficulty:g}, {item.state.value}: {ended}  "
        f"({len(one.completions)} completions in {end - begin:.2f} s, {outcome.tool_calls} tool calls, "
        f"{outcome.tool_errors} of them failed, {outcome.tool_wait_s:.2f} s of tools)"
    )
    root = Tree(Text(head, style="bold"))
    for turn in tree(one):
        _add(root, turn, codec, (begin, end), tokens=tokens, most=most)
    return root


def _add(
    node: Tree, turn: Turn, codec: HfChatCodec, within: tuple[float, float], *, tokens: bool, most: int | None
) -> None:
    """One turn; where a single one follows, it stands below it and not inside: conversations are long."""
    from rich.text import Text

    from forge.report.conversation import facts, timeline, token_rows

    while True:
        c = turn.completion
        here = node.add(Text(f"{facts(turn)}\n{timeline(c, *within)}", style="cyan"))
        here.add(Text(_cut(codec.text(turn.new_ids), most), style="dim"))
        if tokens:
            rows = [f"{logprob:8.3f}  {version:4d}  {text!r}" for text, logprob, version in token_rows(c, codec.text)]
            here.add(Text("\n".join(rows)))
        else:
            here.add(Text(_cut(codec.text(c.sampled_ids), most)))
        if len(turn.children) != 1:
            break
        turn = turn.children[0]
    for child in turn.children:
        _add(here, child, codec, within, tokens=tokens, most=most)


def _cut(text: str, most: int | None) -> str:
    if most is None or len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ... {len(text) - 2 * half} characters ... {text[-half:]}"


def _plain(one: Trajectory) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(one)
