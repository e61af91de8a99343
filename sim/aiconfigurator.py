"""AIConfigurator's estimates of our measured cells, from an environment of its own (aiconfigurator==0.12.0).

Its aggregated mode is asked for the cell's model, system, backend, widths, lengths and concurrency, with the newest
operator tables it has for the backend (it has none for most measured versions). The checkpoint says how a model is
quantised; where that is bf16 and the row is not, the row's modes are given.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from forge.types import ForgeError, Json
from sim import aiconfigurator_driver
from sim.accuracy import METRICS, Prediction
from sim.accuracy_data import Cell

#: Checkpoints of the table that it knows by another name: of the same shape, and in bf16 where the row need not be.
NAMES = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "zhipuai/GLM-5": "zai-org/GLM-5-FP8",
}
BF16 = ("Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B")
#: What `compare` gives.
FIGURES = (
    "aiconfigurator_cells",
    *(f"aiconfigurator_{metric}_mape" for metric in METRICS),
    *(f"ours_{metric}_mape_on_its_rows" for metric in METRICS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds, or why there are none."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    refused: str = ""


def query(cell: Cell) -> dict[str, Any]:
    """Keyword arguments of its `cli_estimate`."""
    key = cell.key
    asked: dict[str, Any] = {
        "model_path": NAMES.get(key.model, key.model),
        "system_name": key.system,
        "backend_name": key.backend,
        "isl": cell.isl,
        "osl": cell.osl,
        "batch_size": cell.concurrency,
        "tp_size": key.tp,
    }
    if cell.on.model.experts:
        asked |= {"moe_tp_size": key.moe_tp, "moe_ep_size": key.ep}
    if key.model in BF16 and key.gemm not in ("", "bf16"):
        asked["gemm_quant_mode"] = key.gemm
    return asked


def estimates(python: Path, cells: Sequence[Cell]) -> list[Estimate]:
    """In the order of `cells`; seconds a cell. Raises ForgeError where `python` does not run it."""
    with TemporaryDirectory() as folder:
        queries, answers = Path(folder, "queries.json"), Path(folder, "answers.json")
        queries.write_text(json.dumps([query(cell) for cell in cells]), encoding="utf-8")
        # Isolated, or our package's folder would be the first that its imports search.
        command = [str(python), "-I", aiconfigurator_driver.__file__, str(queries), str(answers)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            raise ForgeError(f"--aiconfigurator {python}: cannot be run: {error.strerror}") from None
        if done.returncode or not answers.exists():
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise ForgeError(
                f"--aiconfigurator {python}: {last}; it must be a Python with aiconfigurator==0.12.0 installed"
            )
        told = json.loads(answers.read_text(encoding="utf-8"))
    return [_estimate(one) for one in told]


def _estimate(answer: dict[str, Any]) -> Estimate:
    if "refused" in answer:
        return Estimate(refused=answer["refused"])
    return Estimate(ttft_s=answer["ttft_ms"] / 1e3, tpot_s=answer["tpot_ms"] / 1e3)


def compare(python: Path, ours: Sequence[Prediction]) -> Json:
    """Its mean errors and ours on the cells that it accepts, `cells` of them; `refused`: the others by reason."""
    theirs = estimates(python, [one.cell for one in ours])
    pairs = [(one, estimate) for one, estimate in zip(ours, theirs, strict=True) if not estimate.refused]
    figures: dict[str, float | int | None] = {"aiconfigurator_cells": len(pairs)}
    for metric in METRICS:
        errors = [abs(getattr(estimate, f"{metric}_s") / one.seconds(metric)[1] - 1.0) for one, estimate in pairs]
        figures[f"aiconfigurator_{metric}_mape"] = fmean(errors) if errors else None
        figures[f"ours_{metric}_mape_on_its_rows"] = fmean(one.error(metric) for one, _ in pairs) if errors else None
    refused = Counter(estimate.refused for estimate in theirs if estimate.refused)
    return {"figures": figures, "refused": dict(refused)}
