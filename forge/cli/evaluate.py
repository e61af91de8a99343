"""`forge eval`: held-out tasks scored per scaffold; `forge scaffolds`: the scaffolds there are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from forge.cli import app
from forge.cli.options import RUNS, AsJson, Runs, print_json
from forge.cli.simulate import need_live
from forge.scaffolds import DEFAULT, select
from forge.types import ForgeError, Json

if TYPE_CHECKING:
    from pathlib import Path

    from forge.live.scoring import Asked, Subject
    from forge.types import Outcome

#: columns where no terminal says how many
PIPED = 2000
#: rows of the table that are printed; of more, the lowest and the highest half of as many
SHOWN = 40


@app.command("eval")
def evaluate(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A model folder, one that ships (quickstart), or a run: its last checkpoint.",
            show_default=False,
        ),
    ],
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="How many, spread evenly over the domains.")] = 60,
    scaffolds: Annotated[
        list[str] | None,
        typer.Option(
            "--scaffolds",
            help=f"Ids or patterns, commas between: plain/native/*/bare, or quickstart. [default: {DEFAULT}]",
            show_default=False,
        ),
    ] = None,
    domains: Annotated[
        list[str] | None,
        typer.Option("--domains", help="Names, commas between. [default: the run's]", show_default=False),
    ] = None,
    split: Annotated[str, typer.Option(help="held_out, validation or train.")] = "held_out",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 decodes greedily.")] = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Episodes of each task in each scaffold.")] = 1,
    max_context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of prompt and answer. [default: the run's, else 512]", show_default=False),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Episodes and requests under way at once.")] = 64,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Score held-out tasks in every scaffold named, with the embedded engine and no training; how far scaffolds differ.

    Tasks are frozen, the same for every model. The first scaffold is what the others are compared with, task by task.
    Everything goes into a run folder: scores.json, scores.png, and the trajectories, which `forge show` shows.
    """
    need_live()
    from forge.live.scoring import Asked, subject

    if split not in ("held_out", "validation", "train"):
        raise ForgeError(f"--split {split}: must be held_out, validation or train")
    chosen: Literal["held_out", "validation", "train"] = split  # type: ignore[assignment]
    asked = Asked(
        scaffolds=select(_named(scaffolds) or [DEFAULT]),
        tasks=tasks,
        domains=_named(domains),
        split=chosen,
        temperature=temperature,
        samples=samples if temperature else 1,
        max_context=max_context,
        slots=slots,
    )
    _score(subject(name, runs), asked, runs, as_json)


def _score(about: Subject, asked: Asked, runs: Path, as_json: bool) -> None:
    from forge.live.scoring import scenario_of, score
    from forge.report.scores import draw
    from forge.runs import RunFolder

    scenario = scenario_of(about, asked)
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else PIPED)
    folder = RunFolder.create(runs, scenario, is_latest=False)
    console.print(f"{about.name}; run folder: {folder.path}", highlight=False, soft_wrap=True)
    with _Watched(console, len(asked.scaffolds) * asked.tasks * asked.samples) as watched:
        result = score(about, asked, folder, watched.take)
    draw(result, folder.path / "scores.png")
    if as_json:
        print_json({"folder": str(folder.path), **result})
    else:
        _show(console, result)


class _Watched:
    """A progress bar with the mean reward so far."""

    def __init__(self, console: Console, episodes: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)
        self._bar = self._progress.add_task("episodes", total=episodes)
        self._rewards = 0.0
        self._ended = 0

    def __enter__(self) -> _Watched:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def take(self, outcome: Outcome) -> None:
        self._ended += 1
        self._rewards += outcome.reward or 0.0
        told = f"episodes, reward {self._rewards / self._ended:.3f}"
        self._progress.update(self._bar, completed=self._ended, description=told)


def _show(console: Console, result: Json) -> None:
    from rich.table import Table

    rows = sorted(result["scaffolds"], key=lambda row: -row["mean"])
    left_out = len(rows) - SHOWN
    shown = [*rows[: SHOWN // 2], *rows[-SHOWN // 2 :]] if left_out > 0 else rows
    table = Table("scaffold", "mean", "95%", "gain over the first", "turns", "died", "faults", box=None, pad_edge=False)
    for row in shown:
        gain = row["gain"]
        over = f"{gain['mean']:+.3f} ({_bounds(gain)})" if gain else ""
        numbers = [f"{row['mean']:.3f}", _bounds(row), over, f"{row['turns']:.1f}"]
        table.add_row(row["scaffold"], *numbers, _counts(row["died"]), _counts(row["faults"]))
    console.print(table, highlight=False)
    if left_out > 0:
        console.print(f"{left_out} scaffolds between them: scores.json has all", style="dim", highlight=False)
    between = result["spread"]
    if between:
        console.print(
            f"between {len(rows)} scaffolds: standard deviation {between['sd']:.3f} ({_bounds(between)}; "
            f"{between['sd_if_alike']:.3f} if all were alike), from {between['range'][0]:.3f} ({between['least']}) "
            f"to {between['range'][1]:.3f} ({between['most']})",
            highlight=False,
            soft_wrap=True,
        )


def _bounds(row: Json) -> str:
    return f"{row['low']:.3f} to {row['high']:.3f}" if row["low"] is not None else "-"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items(), key=lambda one: -one[1]))


def _named(given: list[str] | None) -> list[str]:
    """Options that may be repeated, and hold several names with commas between. A format's id may hold commas too: what
    follows one and has an = but no further / belongs to the name before."""
    names: list[str] = []
    for part in (part.strip() for text in given or () for part in text.split(",")):
        if names and "=" in part.split("/")[0]:
            names[-1] += f",{part}"
        elif part:
            names.append(part)
    return names


@app.command("scaffolds")
def scaffolds(
    name: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="A scaffold to show; none: the parts.", show_default=False)
    ] = None,
    like: Annotated[
        str | None, typer.Option("--list", metavar="PATTERN", help="List ids: '*', react/*, */fold-1/*, quickstart.")
    ] = None,
    suited: Annotated[
        str | None, typer.Option("--for", metavar="MODEL", help="List those that this model can live in: quickstart.")
    ] = None,
    domain: Annotated[str, typer.Option(help="Of the task that is shown.")] = "shop",
    as_json: AsJson = False,
) -> None:
    """List the scaffolds that agents.scaffolds and `forge eval --scaffolds` take, or show what one asks of a model.

    An id is loop/dialect/context/style; a dialect is native, or any format of `forge formats`.
    """
    if suited is not None and suited != "quickstart":
        raise ForgeError(f"--for {suited}: only quickstart is known; other models can live in any scaffold")
    if name is not None:
        _show_scaffold(name, domain, as_json)
    elif like is not None or suited is not None:
        ids = select([like or "quickstart"])
        print_json({"scaffolds": ids}) if as_json else print("\n".join(ids))
    else:
        _show_parts(as_json)


def _show_parts(as_json: bool) -> None:
    from forge.scaffolds import CONTEXTS, DIALECTS, LOOPS, RESULTS, STRATEGIES, STYLES, small, zoo

    parts: dict[str, dict[str, str]] = {
        "loops": {key: one.summary for key, one in LOOPS.items()},
        "dialects": {
            "native": "the API's tool calls",
            "FORMAT": f"in the text: {', '.join(d for d in DIALECTS[1:] if '~' not in d)}, or any of `forge formats`",
            **{f"FORMAT~{key}": f"results {what}" for key, what in RESULTS.items() if key != "format"},
        },
        "contexts": STRATEGIES,
        "styles": {key: one.summary for key, one in STYLES.items()},
    }
    if as_json:
        print_json({"scaffolds": len(zoo()), "quickstart": len(small()), "default": DEFAULT, **parts})
        return
    for title, rows in parts.items():
        print(title)
        for key, what in rows.items():
            print(f"  {key:<14} {what}")
    print(f"context strategies in the zoo: {', '.join(CONTEXTS)}")
    print(
        f"{len(zoo())} scaffolds in the zoo, {len(small())} of them for a model like quickstart; the default: {DEFAULT}"
    )
    print("`--list PATTERN` lists ids, ID shows one")


def _show_scaffold(name: str, domain: str, as_json: bool) -> None:
    need_live()
    from forge.agents.looks import looks
    from forge.scaffolds import get

    shown: dict[str, Any] = looks(get(name), domain)
    if as_json:
        print_json(shown)
        return
    for key, text in shown.items():
        print(f"--- {key}\n{text}")
