"""What `forge calibrate --table` and `--points` write and tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import tomli_w

from forge.cost import Calibrated, hardware
from forge.cost.tables import read
from forge.types import ForgeError, Json
from sim.accuracy import COVERAGE, Progress
from sim.points import calibrate_points
from sim.table_fit import efficiencies, fit


def to_toml(deployments: Mapping[str, Calibrated], notes: Mapping[str, str]) -> str:
    """The file that `CostModel.from_toml` reads, with notes as comments."""
    head = "".join(f"# {key}: {value}\n" for key, value in notes.items())
    return head + tomli_w.dumps({"deployments": {name: one.to_dict() for name, one in deployments.items()}})


def from_table(folder: Path, backend: str, card: str | None = None) -> tuple[str, Json]:
    """(TOML, what to tell) of operator tables. `card`: the hardware's description, by default of the folder's name."""
    if not folder.is_dir():
        raise ForgeError(f"--table {folder}: no such folder; it is one like h200_sxm, with OPERATOR/BACKEND/VERSION/")
    on = hardware(card or folder.resolve().name)
    fits = fit(read(folder, backend), on)
    notes = {name: f"{one.rows} rows, median error {one.median:.1%}" for name, one in fits.items()}
    name = f"{folder.resolve().name} {backend} {next(iter(fits.values())).version}"
    found = Calibrated(efficiencies=efficiencies(fits))
    return to_toml({name: found}, notes), {"operators": {key: asdict(one) for key, one in fits.items()}}


def from_points(path: Path, progress: Progress | None = None) -> tuple[str, Json]:
    """(TOML, what to tell) of serving points."""
    found = calibrate_points(path, progress)
    notes = {"error bars": f"hold {COVERAGE:.0%} of measurements, learnt by {found.protocol}"}
    told = {
        "protocol": found.protocol,
        "cells": len(found.table.clean),
        "excluded": dict(found.table.excluded),
        "deployments": {name: one.to_dict() for name, one in found.deployments.items()},
    }
    return to_toml(found.deployments, notes), told
