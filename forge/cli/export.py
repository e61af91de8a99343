"""`forge export`: a run's trace in formats that other tools read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forge.cli import app
from forge.cli.options import RUNS, RunArg, Runs, check_out
from forge.types import ForgeError


@app.command()
def export(
    run: RunArg,
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Chrome trace events, for ui.perfetto.dev: requests, items, steps.")
    ] = False,
    parquet: Annotated[
        bool, typer.Option("--parquet", help="requests.parquet and items.parquet, which new runs have already.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File of --perfetto; by default trace.perfetto.json of the run.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Write a run's trace for other tools: a timeline for Perfetto, tables of requests and items."""
    from forge.runs import RunFolder

    if not (perfetto or parquet):
        raise ForgeError("nothing to export: give --perfetto, --parquet or both")
    if out is not None and not perfetto:
        raise ForgeError(f"--out {out}: is the file of --perfetto; tables go into the run's folder")
    folder = RunFolder.open(run, runs)
    if perfetto:
        from forge.report.perfetto import write_perfetto

        if out is not None:
            check_out(out)
        print(write_perfetto(folder.events(), out or folder.path / "trace.perfetto.json"))
    if parquet:
        from forge.tables import write_tables

        for path in write_tables(folder.events(), folder.path):
            print(path)
