"""`forge bench NAME`: measure now, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from forge.cli import app
from forge.cli.options import AsJson, print_json
from forge.cli.simulate import need_live
from forge.doctor import machine
from forge.types import ForgeError, Json

bench = typer.Typer(help="Benchmarks: both sides of every ratio measured in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

Data = Annotated[
    Path | None, typer.Option("--data", help="Folder of public data sets; without it rows on real traces are left out.")
]


@bench.command()
def tree(
    factor: Annotated[
        int, typer.Option(min=1, max=10, help="Divides prompt (20k) and turn (500 tokens) of the agent workload.")
    ] = 10,
    data: Data = None,
    as_json: AsJson = False,
) -> None:
    """Prefix-tree merging: speed-up over two baselines, its bound, attention against a dense mask, memory. Minutes."""
    need_live()
    from forge.bench.tree import run

    if data is not None and not data.is_dir():
        raise ForgeError(f"--data {data}: no such folder")
    console = Console(stderr=as_json)
    with console.status(f"training steps on merged and flat samples (factor {factor}); some minutes"):
        result = run(data=data, factor=factor)
    if as_json:
        print_json({"bench": "tree", "machine": machine(), **result})
        return
    show(console, result)


@bench.command("sim-accuracy")
def sim_accuracy(
    data: Data = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Fit on this folder alone and score on --data; without it, cross-validate.")
    ] = None,
    aiconfigurator: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON",
            help="Python of an environment with aiconfigurator==0.12.0: scored beside, in some minutes.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulator's cost model against measured TTFT and TPOT, on deployments it has not seen. A minute."""
    from sim.accuracy_bench import run

    console = Console(stderr=as_json)
    with console.status("fitting") as status:
        result = run(
            data, calibration, lambda done, of: status.update(f"deployment {done} of {of} left out"), aiconfigurator
        )
    if as_json:
        print_json({"bench": "sim-accuracy", "machine": machine(), **result})
        return
    show_accuracy(console, result)


@bench.command("sim-speed")
def sim_speed(
    data: Data = None,
    campaign_samples: Annotated[
        int, typer.Option(min=0, help="Samples of the campaign that is timed; 0 leaves it out.")
    ] = 3000,
    as_json: AsJson = False,
) -> None:
    """Simulated requests a CPU second on a real trace, against stepping every iteration; errors must be 0. Minutes."""
    from sim.speed_bench import both

    console = Console(stderr=as_json)
    with console.status("starting") as status:
        result = both(data, campaign_samples, status.update)
    if as_json:
        print_json({"bench": "sim-speed", "machine": machine(), **result})
        return
    console.print(result["protocol"], highlight=False)
    show_figures(console, result)


@bench.command()
def routing(
    data: Data = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One load, one signal, two seeds, short traces: half a minute.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Routers on recorded work, by load, routers in parallel and age of signals: paired mean TTFT. Ten minutes."""
    from sim.routing_bench import FULL, QUICK, run

    console = Console(stderr=as_json)
    columns = TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("runs", total=None)
        result = run(data, QUICK if quick else FULL, lambda done, of: progress.update(task, completed=done, total=of))
    if as_json:
        print_json({"bench": "routing", "machine": machine(), **result})
        return
    show_routing(console, result)


@bench.command()
def gateway(
    litellm: Annotated[
        Path | None,
        typer.Option(
            metavar="PYTHON", help="Python of an environment with litellm[proxy]==1.108.7, which is measured beside."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the gateway adds to a streamed chunk at half of saturation; 1,000 sessions; beside LiteLLM. Minutes."""
    need_live()
    from forge.bench.gateway import run

    console = Console(stderr=as_json)
    with console.status("starting") as status:
        result = run(litellm, status.update)
    if as_json:
        print_json({"bench": "gateway", "machine": machine(), **result})
        return
    console.print(result["protocol"], highlight=False)
    show_figures(console, result)


@bench.command()
def sandbox(
    sandboxes: Annotated[int, typer.Option(min=1, help="How many are started and ended.")] = 200,
    as_json: AsJson = False,
) -> None:
    """Agents' sandboxes: start-up, what ends leave behind, and every escape of the battery tried. A minute."""
    from forge.bench.sandbox import run

    console = Console(stderr=as_json)
    with console.status("starting") as status:
        result = run(sandboxes, status.update)
    if as_json:
        print_json({"bench": "sandbox", "machine": machine(), **result})
        return
    console.print(result["protocol"], highlight=False)
    for row in result["rows"]:
        how = ", ".join(row["met"]) or row["said"]
        console.print(f"{row['name']:<24} {'contained' if row['contained'] else 'ESCAPED':<10} {how}", highlight=False)
    for what in result["not_limited"]:
        console.print(f"not limited on this machine: {what}", highlight=False)
    show_figures(console, result)


@bench.command()
def blackbox(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Cases of forge/bench/blackbox.toml; without any, all.", show_default=False),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="plain, 429, 500, cut, stall, compaction, sub_agent; all by default.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Agent programs of others, as installed by `forge blackbox install`, on one task each under a scripted policy: do
    they finish, also under faults, and is the tree that the gateway recovers the right one. Half an hour."""
    need_live()
    from forge.bench.blackbox import run
    from forge.bench.blackbox_cases import VARIANTS

    chosen = [one for one in VARIANTS if one in variant] if variant else list(VARIANTS)
    if unknown := sorted(set(variant or ()) - set(VARIANTS)):
        raise ForgeError(f"--variant {unknown[0]}: must be one of {', '.join(VARIANTS)}")
    console = Console(stderr=as_json)
    with console.status("starting") as status:
        result = run(names or (), chosen, status.update)
    if as_json:
        print_json({"bench": "blackbox", "machine": machine(), **result})
        return
    console.print(result["protocol"], highlight=False)
    for row in result["rows"]:
        tree = (
            row["shape"] if row["shape"] in row["expected"] else f"{row['shape']}, not {' or '.join(row['expected'])}"
        )
        console.print(
            f"{row['program']:<20} {row['variant']:<10} {row['outcome']:<10} {row['requests']:>3} requests, "
            f"{row['seconds']:5.1f} s  {tree}",
            highlight=False,
            soft_wrap=True,
        )
    for what, why in result["left_out"].items():
        console.print(f"left out: {what}, {why}", highlight=False)
    show_figures(console, result)


@bench.command()
def scaffolds(
    count: Annotated[int, typer.Option("--count", min=1, help="Combinations that are drawn and played.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of the draw.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Random (scaffold, environment, seed) combinations, each to its end through gateway and pool. A minute."""
    need_live()
    from forge.bench.scaffolds import run

    console = Console(stderr=as_json)
    columns = TextColumn("episodes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("episodes", total=count)
        result = run(count, seed, lambda ended: progress.update(task, completed=ended))
    if as_json:
        print_json({"bench": "scaffolds", "machine": machine(), **result})
        return
    show_scaffolds(console, result)


def show_scaffolds(console: Console, result: Json) -> None:
    console.print(result["protocol"], highlight=False)
    table = Table("part", "name", box=None, pad_edge=False)
    for title in ("episodes", "mean reward", "deaths", "turns"):
        table.add_column(title, justify="right")
    for row in result["rows"]:
        numbers = [str(row["episodes"]), f"{row['mean_reward']:.3f}", str(row["deaths"]), f"{row['turns']:.1f}"]
        table.add_row(row["part"], row["name"], *numbers)
    console.print(table)
    for what in ("deaths", "faults", "forks"):
        told = ", ".join(f"{name} {number}" for name, number in result[what].items())
        console.print(f"{what}: {told or 'none'}", highlight=False, soft_wrap=True)
    show_figures(console, result)


def show_routing(console: Console, result: Json) -> None:
    console.print(result["protocol"], highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("work", "load", "routers", "signal s", "ours s", "best other s", "which", "gain", "beaten by"):
        table.add_column(title, justify="left" if title in ("work", "which", "beaten by") else "right")
    for row in result["rows"]:
        by_name, best = row["routers_compared"], row["best_baseline"]
        table.add_row(
            row["workload"],
            *(f"{row[key]:g}" for key in ("load", "routers", "signal_s")),
            *(f"{by_name[name]['ttft_s']:.3f}" for name in ("seconds", best)),
            best,
            f"{row['gain']:+.1%}",
            ", ".join(row["beaten_by"]),
        )
    if result["rows"]:
        console.print(table)
    for name, reason in result["left_out"].items():
        console.print(f"left out: {name}, {reason}", highlight=False)
    show_figures(console, result)


def show_figures(console: Console, result: Json) -> None:
    for name, value in result["figures"].items():
        console.print(f"{name:<30} {_cell(value)}", highlight=False)
    for reason in dict.fromkeys(result["reasons"].values()):
        names = ", ".join(name for name, why in result["reasons"].items() if why == reason)
        console.print(f"null, {reason}: {names}", highlight=False)


def show_accuracy(console: Console, result: Json) -> None:
    console.print(f"{result['protocol']}; errors as fractions of the measured value", highlight=False)
    columns = ("group", "cells", "tpot_mape", "tpot_median", "ttft_mape", "ttft_median")
    titles = ("cells of", "number", "TPOT mean", "TPOT median", "TTFT mean", "TTFT median")
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="left" if title == titles[0] else "right")
    for row in result["rows"]:
        table.add_row(*(_cell(row[key]) for key in columns))
    if result["rows"]:
        console.print(table)
    for reason, rows in result["excluded"].items():
        console.print(f"left out: {rows:>4} rows, {reason}", highlight=False)
    for one in result["replays"]:
        errors = ", ".join(f"{m.upper()} {one[f'{m}_error']:+.1%}" for m in ("ttft", "tpot", "e2e"))
        console.print(f"replay of {one['run']}, the half not calibrated on: {errors}", highlight=False)
    for one in (result["staleness"] or {"rows": []})["rows"]:
        kind = "fitted" if one["fitted"] else "predicted"
        step = f"{one['predicted_step_s']:.0f} s a step, measured {one['measured_step_s']:.0f}"
        console.print(f"verl at staleness {one['staleness']:g}, {kind}: {step} ({one['error']:+.1%})", highlight=False)
    for reason, cells in result["refused"].items():
        console.print(f"AIConfigurator refuses {cells:>4} cells: {reason}", highlight=False)
    show_figures(console, result)


def show(console: Console, result: Json) -> None:
    console.print(f"{result['model']} on {result['device']}: {result['workload']}", highlight=False)
    table = Table(box=None, pad_edge=False)
    columns = {
        "workload": "workload",
        "flat_over_unique": "F/U",
        "attention_ratio": "attention",
        "flop_bound": "FLOP bound",
        "speedup_vs_per_request": "vs per request",
        "efficiency": "of the bound",
        "speedup_vs_trajectory": "vs per trajectory",
        "merged_mib": "MiB",
        "per_request_mib": "MiB per request",
    }
    for title in columns.values():
        table.add_column(title, justify="left" if title == "workload" else "right")
    for row in result["rows"]:
        table.add_row(*(_cell(row[key]) for key in columns))
    console.print(table)
    for name, value in result["figures"].items():
        console.print(f"{name:<28} {_cell(value)}", highlight=False)


def _cell(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.3g}"
