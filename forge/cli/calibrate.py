"""`forge calibrate`: the simulator from a live run, its cost model from operator tables or serving points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from forge.cli import app
from forge.cli.options import RUNS, AsJson, Runs, check_out, print_json
from forge.types import ForgeError, Json


@app.command()
def calibrate(
    run: Annotated[
        str | None,
        typer.Argument(help="A run folder, its name under --runs, or `latest`.", show_default=False),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="Folder of a device's operator latencies, OPERATOR/BACKEND/VERSION/*_perf.parquet."),
    ] = None,
    backend: Annotated[str, typer.Option(help="Whose latencies of --table: vllm or sglang.")] = "vllm",
    hardware: Annotated[
        str | None, typer.Option(help="Description of --table's device; by default the one of the folder's name.")
    ] = None,
    points: Annotated[
        Path | None,
        typer.Option(
            help="CSV of measured serving points: model_path, system, backend, tp_size, isl, osl, batch_size (requests "
            "in flight), silicon_ttft_ms, silicon_tpot_ms; and, where known, backend_version, gemm_quant_mode, "
            "moe_quant_mode, moe_tp_size, moe_ep_size."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The file for what is fitted.")] = Path("calibration.toml"),
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Fit the simulator to a live run's trace, or its cost model to operator tables or serving points.

    Of a RUN it writes the \\[sim] section for `--calibration`; of --table and --points the efficiencies, factors and
    error bars that `CostModel.from_toml` reads.
    """
    if sum(source is not None for source in (run, table, points)) != 1:
        raise ForgeError("calibrate: give exactly one of RUN, --table DIR and --points CSV")
    check_out(out)
    if run is not None:
        _run(run, out, runs, as_json)
    elif table is not None:
        _table(table, backend, hardware, out, as_json)
    elif points is not None:
        _points(points, out, as_json)


def _run(run: str, out: Path, runs: Path, as_json: bool) -> None:
    from forge.cli.finish import warn
    from forge.metrics import summarise
    from forge.runs import RunFolder
    from sim.calibrate import calibrate, to_toml

    folder = RunFolder.open(run, runs)
    events, scenario = list(folder.events()), folder.scenario()
    warn(folder, summarise(events, scenario))
    fitted = calibrate(events, scenario, source=folder.path.name)
    out.write_text(to_toml(fitted), encoding="utf-8")
    if as_json:
        print_json({"sim": fitted.sim.model_dump(mode="json"), "quality": fitted.quality, "notes": fitted.notes})
        return
    for key, value in fitted.quality.items():
        print(f"{key:<40} {value:.4g}")
    for note in fitted.notes:
        print(f"note: {note}")
    print(f"wrote {out}; use it with --calibration {out}")


def _table(table: Path, backend: str, hardware: str | None, out: Path, as_json: bool) -> None:
    from sim.calibrations import from_table

    toml, told = from_table(table, backend, hardware)
    out.write_text(toml, encoding="utf-8")
    if as_json:
        print_json(told)
        return
    for name, one in told["operators"].items():
        print(
            f"{name} ({one['version']}): {one['rows']} rows, error mean {one['mean']:.1%}, median {one['median']:.1%}"
        )
        print(f"    {_numbers(one['efficiencies'] | one['overheads'])}")
        print(f"    median by format: {', '.join(f'{key} {value:.1%}' for key, value in one['by_format'].items())}")
        for reason, count in one["excluded"].items():
            print(f"    left out: {count} rows, {reason}")
    print(f"wrote {out}; read it with CostModel.from_toml")


def _points(points: Path, out: Path, as_json: bool) -> None:
    from sim.calibrations import from_points

    with Console(stderr=True).status("fitting") as status:
        toml, told = from_points(points, lambda done, of: status.update(f"{done} of {of} left out"))
    out.write_text(toml, encoding="utf-8")
    if as_json:
        print_json(told)
        return
    _show_points(told)
    print(f"wrote {out}; read it with CostModel.from_toml")


def _show_points(told: Json) -> None:
    for reason, count in told["excluded"].items():
        print(f"left out: {count} rows, {reason}")
    print(f"{told['cells']} points; error bars by {told['protocol']}")
    for name, one in told["deployments"].items():
        bars = ", ".join(f"{metric.upper()} within {value:.1%}" for metric, value in one["error"].items())
        print(f"{name}: {bars or 'too few points for error bars'}")


def _numbers(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())
