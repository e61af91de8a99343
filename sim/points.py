"""`forge calibrate --points CSV`: the serving model fitted to your own measured points, with error bars it has learnt.

The columns are those of AIConfigurator's samples: `model_path`, `system`, `backend`, `tp_size`, `isl`, `osl`,
`batch_size` (requests in flight), `silicon_ttft_ms`, `silicon_tpot_ms`; and where known those of
`sim.accuracy_data.OPTIONAL`. A deployment needs three rows at least. With three deployments or more the bars come from
leaving out each of them in turn, with fewer from leaving out cells in turn: an easier test, and said so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forge.cost import Calibrated, CostModel
from forge.types import ForgeError
from sim.accuracy import METRICS, Bars, Prediction, Progress, bar, bars, calibrate
from sim.accuracy_data import Cell, Table, read
from sim.serving_fit import fit

DEPLOYMENTS, CELLS = "leaving out a deployment at a time", "leaving out a cell at a time, of deployments in training"
#: Deployments of which one can be left out: a fit of less than two says nothing of a third.
SEVERAL = 3
#: Cells of which one can be left out for a bar to be learnt: see `sim.accuracy.COVERAGE`.
FEWEST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """`deployments` by name; `table` with what was left out; `protocol`: how the error bars were learnt."""

    deployments: dict[str, Calibrated]
    table: Table
    protocol: str


def calibrate_points(path: Path, progress: Progress | None = None) -> Points:
    """Raises ForgeError, naming the file, where too few clean points are left."""
    table = read(path)
    first = {str(cell.key): cell for cell in table.clean}
    if not first:
        raise ForgeError(f"{path}: no clean serving point in {table.rows} rows: {_left_out(table)}")
    if len(first) >= SEVERAL:
        whole = calibrate(table.clean, progress)
        fitted, errors = whole.fitted, {metric: _learnt(whole.bars, metric) for metric in METRICS}
    else:
        fitted, errors = fit(table.clean), _by_cells(path, table.clean, progress)
    models = {name: replace(fitted.cost_model(cell), error=errors) for name, cell in first.items()}
    found = {name: _calibrated(model) for name, model in models.items()}
    return Points(deployments=found, table=table, protocol=DEPLOYMENTS if len(first) >= SEVERAL else CELLS)


def _by_cells(path: Path, cells: Sequence[Cell], progress: Progress | None) -> dict[str, float]:
    """Error bars by metric."""
    if len(cells) < FEWEST:
        raise ForgeError(f"{path}: {len(cells)} clean points; error bars need {FEWEST} at least")
    left_out = []
    for done, cell in enumerate(cells):
        ttft, tpot = fit([one for one in cells if one is not cell]).predict([cell])
        left_out.append(Prediction(cell=cell, ttft_s=float(ttft[0]), tpot_s=float(tpot[0]), sibling=True))
        if progress is not None:
            progress(done + 1, len(cells))
    learnt = bars(left_out)
    return {metric: bar(learnt, metric, True) for metric in METRICS}


def _learnt(learnt: Bars, metric: str) -> float:
    """Of deployments with a sibling in training, as one that was itself in it has; where none had, of the others."""
    sibling = bar(learnt, metric, True)
    return sibling if math.isfinite(sibling) else bar(learnt, metric, False)


def _calibrated(model: CostModel) -> Calibrated:
    return Calibrated(
        efficiencies=model.by,
        decode_factor=model.decode_factor,
        prefill_factor=model.prefill_factor,
        error=model.error,
    )


def _left_out(table: Table) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in table.excluded.items()) or "it is empty"
