"""Measured serving points: `aiconfigurator/hopper_serving_measured.csv` to clean cells.

A row is the mean TTFT and TPOT of one deployment under a closed loop of `batch_size` requests. Rows that no model of
one engine can answer for, or that are not physical, are left out and counted by reason;
repeats of a cell are merged by their median. Cells whose KV nearly fills the memory are kept apart: they measure the
queue before admission, not the engine.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TypeVar

from forge.cost import Deployment, Hardware, ModelCard, Precision, hardware, model_card
from forge.types import ForgeError

TABLE = "aiconfigurator/hopper_serving_measured.csv"
#: Quantisation of a row to formats of (dense weights, experts). On Hopper 4-bit weights compute in bf16.
FORMATS = {
    "": ("bf16", "bf16"),
    "bf16": ("bf16", "bf16"),
    "fp8": ("fp8", "fp8"),
    "fp8_block": ("fp8", "fp8"),
    "nvfp4": ("bf16", "mxfp4"),
    "int4_wo": ("bf16", "int4"),
}
#: Columns that a table may leave out: an unknown version, bf16, experts split as `tp_size` says (give both of their
#: widths or neither), one replica. A blank width is 1.
OPTIONAL = ("backend_version", "precision", "gemm_quant_mode", "moe_quant_mode", "moe_ep_size", "attention_dp_size")
MFU_LIMIT = 0.62
#: Share of the KV space that all requests together may come to need before a cell counts as saturated: engines keep
#: some for activations and graphs, each another part.
KV_LIMIT = 0.75

UNKNOWN_MODEL, UNKNOWN_SYSTEM = "no description of the model", "no description of the hardware"
UNKNOWN_FORMAT, NOT_MEASURED = "unknown quantisation", "no positive TTFT and TPOT"
WIDE, REPLICAS, WIDTH = "tp_size > 8", "attention_dp_size > 1", "MoE width != tp"
OVERLOAD, MFU = "gpt-oss at concurrency 512", f"implied MFU > {MFU_LIMIT}"
FEW, TOO_FAST = "deployments with fewer than 3 rows", "Llama-3.1-8B-FP8 on vLLM"
SATURATED = "KV-saturated (scored apart)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What makes a deployment one: another value of any of these is another deployment."""

    model: str
    system: str
    backend: str
    version: str
    precision: str
    gemm: str
    moe: str
    tp: int
    moe_tp: int
    ep: int

    def __str__(self) -> str:
        experts = f" EP{self.ep}" if self.ep > 1 else ""
        name = f"{self.model.split('/')[-1]} {self.system} {self.backend} {self.version or '?'}"
        return f"{name} {self.gemm or 'bf16'} TP{self.tp}{experts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`concurrency` requests of `isl` prompt and `osl` output tokens in flight; mean seconds measured, over `rows`
    repeats. `harness`: who measured, which decides lengths and pacing. `saturated`: see the module."""

    key: Key
    on: Deployment
    isl: int
    osl: int
    concurrency: int
    ttft_s: float
    tpot_s: float
    harness: str = ""
    rows: int = 1
    saturated: bool = False

    @property
    def mfu(self) -> float:
        """Share of peak FLOPs that the tokens served a second imply, attention left out."""
        span = self.ttft_s + self.tpot_s * (self.osl - 1)
        flops = 2 * self.on.model.active_weights * (self.isl + self.osl) * self.concurrency / span
        number = FORMATS[self.key.gemm][0]
        return flops / self.on.devices / self.on.hardware.peak(number)

    @property
    def kv_share(self) -> float:
        """Of the KV space, when every request has its last token."""
        free = self.on.kv_tokens
        return self.concurrency * (self.isl + self.osl) / free if free > 0 else float("inf")


@dataclass(frozen=True)
class Table:
    """Clean cells, saturated ones among them, and how many of the `rows` rows were left out, by reason."""

    cells: tuple[Cell, ...]
    rows: int
    excluded: Counter[str]

    @property
    def clean(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.saturated]

    @property
    def saturated(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.saturated]


def load(data: Path) -> Table:
    """The table of a data folder; see `read`."""
    return read(data / TABLE)


def read(path: Path) -> Table:
    """Read and clean a table, which may leave out the columns of `OPTIONAL`, and those that nothing here reads.

    Raises ForgeError, naming file and line, for what is no such table.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            raw = [(f"{path}:{i}", _filled(row)) for i, row in enumerate(csv.DictReader(file), 2)]
    except OSError as error:
        raise ForgeError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ForgeError(f"{path}: not a CSV table: {error}") from None
    excluded: Counter[str] = Counter()
    cells = []
    describe = _Descriptions()
    for where, row in raw:
        cell = _parse(where, row, describe)
        if isinstance(cell, str):
            excluded[cell] += 1
        else:
            cells.append(cell)
    return Table(tuple(_merge(_clean(cells, excluded), excluded)), len(raw), excluded)


def _filled(row: dict[str, str]) -> dict[str, str]:
    return dict.fromkeys(OPTIONAL, "") | {"moe_tp_size": row.get("tp_size", "")} | row


class _Descriptions:
    """Descriptions by the table's names, each read once; None where there is none."""

    def __init__(self) -> None:
        self._models: dict[str, ModelCard | None] = {}
        self._systems: dict[str, Hardware | None] = {}

    def model(self, name: str) -> ModelCard | None:
        if name not in self._models:
            self._models[name] = _found(lambda: model_card(name))
        return self._models[name]

    def system(self, name: str) -> Hardware | None:
        if name not in self._systems:
            self._systems[name] = _found(lambda: hardware(name))
        return self._systems[name]


Described = TypeVar("Described")


def _found(read: Callable[[], Described]) -> Described | None:
    try:
        return read()
    except ForgeError:
        return None


def _parse(where: str, row: dict[str, str], describe: _Descriptions) -> Cell | str:
    """A cell, or why a row can be none. Raises ForgeError for a row that breaks the format."""
    try:
        width = {name: int(row[name] or 1) for name in ("tp_size", "moe_tp_size", "moe_ep_size", "attention_dp_size")}
        isl, osl, concurrency = (int(row[name]) for name in ("isl", "osl", "batch_size"))
        ttft_s, tpot_s = (float(row[name]) / 1e3 for name in ("silicon_ttft_ms", "silicon_tpot_ms"))
        names = [row[n] for n in ("model_path", "system", "backend", "backend_version", "precision")]
        gemm, moe = row["gemm_quant_mode"], row["moe_quant_mode"]
    except KeyError as error:
        raise ForgeError(f"{where}: no column {error}; is this {TABLE}?") from None
    except (ValueError, TypeError) as error:
        raise ForgeError(f"{where}: not a measured serving point: {error}") from None
    if width["tp_size"] > 8:
        return WIDE
    if width["attention_dp_size"] > 1:
        return REPLICAS
    model, system = describe.model(names[0]), describe.system(names[1])
    if model is None or system is None:
        return UNKNOWN_MODEL if model is None else UNKNOWN_SYSTEM
    if gemm not in FORMATS or moe not in FORMATS:
        return UNKNOWN_FORMAT
    if not (ttft_s > 0 and tpot_s > 0 and min(isl, osl, concurrency) > 0):
        return NOT_MEASURED
    tp, moe_tp, ep = width["tp_size"], width["moe_tp_size"], width["moe_ep_size"]
    if model.experts and moe_tp * ep != tp:
        return WIDTH
    key = Key(
        model=names[0],
        system=names[1],
        backend=names[2],
        version=names[3],
        precision=names[4],
        gemm=gemm,
        moe=moe,
        tp=tp,
        moe_tp=moe_tp,
        ep=ep,
    )
    precision = Precision(dense=FORMATS[gemm][0], experts=FORMATS[moe][1])
    on = Deployment(model=model, hardware=system, precision=precision, tp=tp, ep=ep if model.experts else 1)
    # The tools' own sweeps (fixed lengths) leave this column blank, InferenceX's rows (random lengths) do not.
    harness = "random lengths" if row["attention_dp_size"] else "fixed lengths"
    return Cell(
        key=key, on=on, isl=isl, osl=osl, concurrency=concurrency, ttft_s=ttft_s, tpot_s=tpot_s, harness=harness
    )


def _clean(cells: Iterable[Cell], excluded: Counter[str]) -> list[Cell]:
    """Rows of one engine that are plausible; the rest counted under the first reason that holds."""
    cells = list(cells)
    sizes = Counter(cell.key for cell in cells)
    kept = []
    for cell in cells:
        if cell.on.model.name.startswith("gpt-oss") and cell.concurrency >= 512:
            excluded[OVERLOAD] += 1
        elif cell.mfu > MFU_LIMIT:
            excluded[MFU] += 1
        elif sizes[cell.key] < 3:
            excluded[FEW] += 1
        elif cell.key.model.endswith("Llama-3.1-8B-Instruct-FP8") and cell.key.backend == "vllm":
            excluded[TOO_FAST] += 1
        else:
            kept.append(cell)
    return kept


def _merge(rows: Iterable[Cell], excluded: Counter[str]) -> list[Cell]:
    """Repeats of a cell by their median."""
    groups: dict[tuple[Key, int, int, int], list[Cell]] = {}
    for row in rows:
        groups.setdefault((row.key, row.isl, row.osl, row.concurrency), []).append(row)
    merged = []
    for group in groups.values():
        first = group[0]
        full = first.kv_share > KV_LIMIT
        if full:
            excluded[SATURATED] += len(group)
        ttft_s, tpot_s = median(row.ttft_s for row in group), median(row.tpot_s for row in group)
        merged.append(replace(first, ttft_s=ttft_s, tpot_s=tpot_s, rows=len(group), saturated=full))
    return merged
