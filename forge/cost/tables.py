"""Operator latencies as AIConfigurator's collectors write them: `DIR/OPERATOR/BACKEND/VERSION/NAME_perf.parquet`.

    rows = read(Path("h200_sxm"), "vllm")   # {"gemm": Rows, "moe": Rows, ...}, the newest version of each

Read are `gemm`, `context_attention`, `generation_attention`, `moe` and `custom_allreduce`: what the roofline has an
efficiency for. Of attention only whole contexts (no window), of all-reduce only what runs in a CUDA graph, as decoding
does. A table that is absent is left out; what is in `DIR` besides is not used.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from forge.types import ForgeError

Array = NDArray[Any]

#: Table -> its folder, the columns that say what was run, and those that name a kind.
TABLES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "gemm": ("gemm", ("m", "n", "k"), ("gemm_dtype", "kernel_source")),
    "context_attention": (
        "attention",
        ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step", "window_size"),
        ("attn_dtype", "kv_cache_dtype"),
    ),
    "generation_attention": (
        "attention",
        ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim", "step", "window_size"),
        ("attn_dtype", "kv_cache_dtype"),
    ),
    "moe": (
        "moe",
        ("num_tokens", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"),
        ("moe_dtype", "distribution"),
    ),
    "custom_allreduce": ("comm", ("num_gpus", "message_size"), ("backend", "allreduce_dtype")),
}
#: No kernel takes this long to be launched: where the quickest 5% of one take longer though they do little, the host
#: was measured. Little: a device of 100 TFLOP/s and 1 TB/s would be done with most of them in half that time.
HOST_FLOOR_S = 30e-6
SLOW_FLOPS, SLOW_BANDWIDTH = 100e12, 1e12
NEAR_FLOOR = 1.5  # rows of such a kernel that take less than this many floors say nothing of the device
FLOOR, NOT_POSITIVE = "within 1.5 of the host's floor", "no positive latency"
WINDOWED, EAGER = "windowed attention", "all-reduce outside a CUDA graph"


@dataclass(frozen=True)
class Rows:
    """Of one table: columns [n], `seconds` [n], the version they are of, and how many were left out, by reason."""

    columns: dict[str, Array]
    seconds: NDArray[np.float64]
    version: str
    excluded: Counter[str] = field(default_factory=Counter)

    def where(self, keep: Array, reason: str) -> Rows:
        """Those of `keep`, [n] of bool; the others are counted under `reason`."""
        left = self.excluded + Counter({reason: int(np.sum(~keep))})
        return Rows({name: c[keep] for name, c in self.columns.items()}, self.seconds[keep], self.version, left)


def read(folder: Path, backend: str) -> dict[str, Rows]:
    """The backend's tables. Raises ForgeError, naming file and column, for what is none, and where none is there."""
    found: dict[str, Rows] = {}
    for name, (operator, numbers, kinds) in TABLES.items():
        paths = sorted((folder / operator / backend).glob(f"*/{name}_perf.parquet"), key=_version)
        if paths:
            found[name] = _clean(name, _read(paths[-1], numbers, kinds))
    if not found:
        there = sorted({path.parent.parent.name for path in folder.glob("*/*/*/*_perf.parquet")})
        raise ForgeError(
            f"{folder}: no operator table of backend {backend!r}; "
            + (
                f"it has {', '.join(there)}: choose with --backend"
                if there
                else "expected OPERATOR/BACKEND/VERSION/..."
            )
        )
    return found


def _version(path: Path) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else -1 for part in path.parent.name.split("."))


def _read(path: Path, numbers: tuple[str, ...], kinds: tuple[str, ...]) -> Rows:
    wanted = [*numbers, *kinds, "latency"]
    try:
        for name in wanted:
            if name not in pq.read_schema(path).names:
                raise ForgeError(f"{path}: no column {name!r}; is this such an operator table?")
        table = pq.read_table(path, columns=wanted)
    except (OSError, pa.ArrowException) as error:
        raise ForgeError(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None
    try:
        columns: dict[str, Array] = {name: table.column(name).to_numpy().astype(float) for name in numbers}
        columns |= {name: table.column(name).to_numpy().astype(str) for name in kinds}
        seconds = table.column("latency").to_numpy().astype(float) / 1e3
    except (ValueError, TypeError) as error:
        raise ForgeError(f"{path}: a column of another type: {error}") from None
    return Rows(columns, seconds, path.parent.name)


def _clean(name: str, rows: Rows) -> Rows:
    rows = rows.where(np.isfinite(rows.seconds) & (rows.seconds > 0), NOT_POSITIVE)
    if "window_size" in rows.columns:
        rows = rows.where(rows.columns["window_size"] == 0, WINDOWED)
    if name == "custom_allreduce":
        rows = rows.where(np.char.endswith(rows.columns["backend"], "graph"), EAGER)
    if name == "gemm":
        rows = rows.where(~_host(rows), FLOOR)
    return rows


def _host(rows: Rows) -> NDArray[np.bool_]:
    """[n]: rows that measure the host, kernel by kernel and format by format."""
    host = np.zeros(len(rows.seconds), bool)
    m, n, k = (rows.columns[name] for name in ("m", "n", "k"))
    slow_s = 2 * m * n * k / SLOW_FLOPS + (n * k + m * k + m * n) / SLOW_BANDWIDTH
    kinds = np.char.add(rows.columns["gemm_dtype"], rows.columns["kernel_source"])
    for kind in np.unique(kinds):
        own = kinds == kind
        floor = float(np.quantile(rows.seconds[own], 0.05))
        little = np.median(slow_s[own & (rows.seconds <= floor)]) < floor / 2
        if floor > HOST_FLOOR_S and little:
            host |= own & (rows.seconds < NEAR_FLOOR * floor)
    return host
