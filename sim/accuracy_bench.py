"""`forge bench sim-accuracy`: its figures, or null with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forge.types import ForgeError, Json
from sim import accuracy_replay, aiconfigurator, staleness_fit
from sim.accuracy import SUBSETS, Prediction, Progress, calibrate, cross_validate, summary
from sim.accuracy_data import TABLE, Table, load

#: Where each set is to be had; folders below --data.
SOURCES = {
    TABLE: "ai-dynamo/aiconfigurator @095f58a (tools' silicon samples, deduplicated)",
    accuracy_replay.FOLDER: "casys-kaist/LLMServingSim @5daddb2",
    staleness_fit.TABLE: "volcengine/verl @2147009, docs/advance/fully_async.md",
}
#: Worst run, mean values; calibrated on every second request of the run, scored on the others.
REPLAYED = {f"replay_{metric}_error": f"{metric}_error" for metric in ("ttft", "tpot", "e2e")}
STALENESS = "verl_step_error_max"
NOT_ASKED = "no --aiconfigurator PYTHON, an environment of its own with aiconfigurator==0.12.0"


def run(
    data: Path | None,
    calibration: Path | None = None,
    progress: Progress | None = None,
    rival: Path | None = None,
) -> Json:
    """Figures, `reasons` of those that are null, `rows` by subset, `deployments`, `excluded` rows by reason, `replays`
    of the real runs, the `staleness` table, and what AIConfigurator, run by the Python `rival`, `refused`."""
    for option, folder in (("--data", data), ("--calibration", calibration)):
        if folder is not None and not folder.is_dir():
            raise ForgeError(f"{option} {folder}: no such folder")
    if rival is not None and not rival.is_file():
        raise ForgeError(f"--aiconfigurator {rival}: no such file; give the Python of its environment")
    figures: dict[str, float | int | None] = dict.fromkeys([*_names(), *REPLAYED, STALENESS, *aiconfigurator.FIGURES])
    result: Json = {"rows": [], "deployments": [], "excluded": {}, "replays": [], "staleness": None, "refused": {}}
    reasons: dict[str, str] = {}
    if missing := _missing(data, TABLE):
        reasons |= dict.fromkeys([*_names(), *aiconfigurator.FIGURES], missing)
    elif data is not None:
        result |= _scored(load(data), load(calibration) if calibration is not None else None, progress, rival)
        figures |= result.pop("figures")
        reasons |= dict.fromkeys([name for name in _names() if figures[name] is None], "no cell of this kind")
        left = "it accepts no cell" if rival is not None else NOT_ASKED
        reasons |= dict.fromkeys([name for name in aiconfigurator.FIGURES if figures[name] is None], left)
    if missing := _missing(data, accuracy_replay.FOLDER):
        reasons |= dict.fromkeys(REPLAYED, missing)
    elif data is not None:
        result["replays"] = [accuracy_replay.score(one) for one in accuracy_replay.load(data)]
        for name, key in REPLAYED.items():
            figures[name] = max(abs(one[key]) for one in result["replays"])
    if missing := _missing(data, staleness_fit.TABLE):
        reasons[STALENESS] = missing
    elif data is not None:
        result["staleness"] = staleness_fit.score(staleness_fit.load(data))
        figures[STALENESS] = result["staleness"]["error_max"]
    return {"protocol": _protocol(calibration), **result, "figures": figures, "reasons": reasons}


def _scored(table: Table, training: Table | None, progress: Progress | None, rival: Path | None) -> Json:
    if training is None:
        scored = cross_validate(table.clean, table.saturated, progress)
    else:
        scored = calibrate(training.clean, progress).predict([*table.clean, *table.saturated])
    clean = [one for one in scored if not one.cell.saturated]
    beside = aiconfigurator.compare(rival, clean) if rival is not None else {"figures": {}, "refused": {}}
    return {
        "figures": _figures(clean, table) | beside["figures"],
        "refused": beside["refused"],
        "rows": _rows(clean, [one for one in scored if one.cell.saturated]),
        "deployments": _deployments(clean),
        "excluded": dict(table.excluded),
    }


def _names() -> list[str]:
    per_subset = [f"{metric}_mape_{subset}" for metric in ("tpot", "ttft") for subset in SUBSETS]
    return [*per_subset, "tpot_median_all", "ttft_median_all", "cells", "excluded"]


def _figures(clean: Sequence[Prediction], table: Table) -> dict[str, float | int | None]:
    figures: dict[str, float | int | None] = {}
    for subset, chosen in SUBSETS.items():
        row = summary([one for one in clean if chosen(one.cell)])
        for metric in ("tpot", "ttft"):
            figures[f"{metric}_mape_{subset}"] = row[f"{metric}_mape"]
            if subset == "all":
                figures[f"{metric}_median_all"] = row[f"{metric}_median"]
    return figures | {"cells": len(clean), "excluded": table.excluded.total()}


def _rows(clean: Sequence[Prediction], saturated: Sequence[Prediction]) -> list[Json]:
    """By subset, then with and without a sibling, then what is scored apart."""
    groups = {name: [one for one in clean if chosen(one.cell)] for name, chosen in SUBSETS.items()}
    groups["with a sibling deployment"] = [one for one in clean if one.sibling]
    groups["without a sibling"] = [one for one in clean if not one.sibling]
    groups["KV-saturated"] = list(saturated)
    return [{"group": name, **summary(group)} for name, group in groups.items()]


def _deployments(clean: Sequence[Prediction]) -> list[Json]:
    groups: dict[str, list[Prediction]] = {}
    for one in clean:
        groups.setdefault(str(one.cell.key), []).append(one)
    return [{"deployment": name, "sibling": own[0].sibling, **summary(own)} for name, own in groups.items()]


def _missing(data: Path | None, needs: str) -> str | None:
    """Why a set cannot be read, and where to get it; None if it is there."""
    if data is not None and (data / needs).exists():
        return None
    place = "no --data folder" if data is None else f"{data / needs}: absent"
    return f"{place}; {needs} is to be had from {SOURCES[needs]}"


def _protocol(calibration: Path | None) -> str:
    return "leaving out one deployment at a time" if calibration is None else f"fitted on {calibration} alone"
