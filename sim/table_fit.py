"""Efficiencies from operator tables (`forge calibrate --table DIR`): the roofline's operators against their latencies.

Each table is fitted alone, logs of latency with a soft-L1 loss and wide priors around the defaults of `Efficiencies`,
every format at once. What a call costs besides the device's work (`call_s`) and, in decoding, what a sequence costs
(`sequence_s`) are fitted along with it and told, but are no efficiencies: an engine's overheads a layer come from
serving points, not from kernels run alone. Forms: that of `forge.cost.operators`, per call instead of per iteration,

    gemm                  call_s + roofline(2 m n k / flops, weights and activations / bandwidth)
    moe                   call_s + roofline(2 t topk 3 h i / expert_flops, chosen experts / expert_bandwidth)
    context_attention     call_s + 4 d heads pairs / attention_flops
    generation_attention  call_s + sequence_s batch + KV bytes / attention_bandwidth
    custom_allreduce      collective_s + 2 (g - 1) / g bytes / link
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forge.cost import Efficiencies, Hardware
from forge.cost.operators import ACTIVATION_BYTES, FORMATS, Number, Work, covered, roofline
from forge.cost.tables import Rows
from sim.robust import robust_fit, slopes_by_difference

Array = NDArray[np.float64]

#: Format of a table -> ours; one that is absent is left out and counted.
NAMES = {
    "bfloat16": "bf16",
    "half": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "int4_wo": "int4",
    "w4a16_mxfp4": "mxfp4",
}
UNKNOWN = "of a format the cost model has not"
NOISE = 0.2  # of a log latency: kernels are chosen by shape
SIGMA = 1.0  # of the log of what is fitted
STEP = 1e-4  # of the forward difference, in logs
CALL_S, SEQUENCE_S = 5e-6, 1e-7  # centres of the priors


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorFit:
    """`efficiencies`: fields of `Efficiencies`; `overheads`: seconds, told only. `mean` and `median` of |predicted /
    measured - 1| over `rows`, and the median by format."""

    efficiencies: dict[str, float]
    overheads: dict[str, float]
    rows: int
    mean: float
    median: float
    by_format: dict[str, float]
    excluded: dict[str, int]
    version: str


Parameters = Mapping[str, float]
Model = Callable[[Parameters], Array]


@dataclass(frozen=True)
class _Operator:
    """How a table is read: its column of formats, what is fitted, and the latencies that follow."""

    formats: str
    efficiencies: tuple[str, ...]
    overheads: tuple[str, ...]
    model: Callable[[Rows, Hardware], Model]


def fit(tables: Mapping[str, Rows], on: Hardware) -> dict[str, OperatorFit]:
    """By table."""
    return {name: _fit(OPERATORS[name], rows, on) for name, rows in tables.items()}


def efficiencies(fits: Mapping[str, OperatorFit]) -> Efficiencies:
    """All that is fitted; the defaults elsewhere."""
    return Efficiencies(**{name: value for one in fits.values() for name, value in one.efficiencies.items()})


def _fit(operator: _Operator, rows: Rows, on: Hardware) -> OperatorFit:
    rows = rows.where(np.isin(rows.columns[operator.formats], list(NAMES)), UNKNOWN)
    model = operator.model(rows, on)
    names = (*operator.efficiencies, *operator.overheads)
    centre = np.array([_centre(name) for name in names])

    def at(betas: Array) -> dict[str, float]:
        return dict(zip(names, (centre * np.exp(betas)).tolist(), strict=True))

    def residuals(betas: Array) -> Array:
        ratio: Array = np.log(model(at(betas)) / rows.seconds) / NOISE
        return ratio

    found = at(robust_fit(residuals, slopes_by_difference(residuals, STEP), np.full(len(names), SIGMA)))
    errors = np.abs(model(found) / rows.seconds - 1.0)
    formats = rows.columns[operator.formats]
    return OperatorFit(
        efficiencies={name: found[name] for name in operator.efficiencies},
        overheads={name: found[name] for name in operator.overheads},
        rows=len(errors),
        mean=float(errors.mean()),
        median=float(np.median(errors)),
        by_format={str(name): float(np.median(errors[formats == name])) for name in np.unique(formats)},
        excluded={reason: count for reason, count in rows.excluded.items() if count},
        version=rows.version,
    )


def _centre(name: str) -> float:
    own = {"call_s": CALL_S, "sequence_s": SEQUENCE_S}
    return own[name] if name in own else float(getattr(Efficiencies(), name))


def _formats(rows: Rows, column: str, on: Hardware) -> tuple[Array, Array]:
    """Bytes an element, and FLOP/s, [n] each."""
    bytes_of = {theirs: FORMATS[ours][0] for theirs, ours in NAMES.items()}
    peak_of = {theirs: on.peak(FORMATS[ours][1]) for theirs, ours in NAMES.items()}
    names = rows.columns[column].tolist()
    return np.array([bytes_of[name] for name in names]), np.array([peak_of[name] for name in names])


def _gemm(rows: Rows, on: Hardware) -> Model:
    m, n, k = (rows.columns[name] for name in ("m", "n", "k"))
    byte, peak = _formats(rows, "gemm_dtype", on)
    compute = 2 * m * n * k / peak
    read = (byte * (n * k + m * k) + ACTIVATION_BYTES * m * n) / on.bandwidth
    return lambda p: p["call_s"] + _array(roofline(compute / p["flops"], read / p["bandwidth"]))


def _moe(rows: Rows, on: Hardware) -> Model:
    c = rows.columns
    byte, peak = _formats(rows, "moe_dtype", on)
    expert = 3 * c["hidden_size"] * c["inter_size"] / c["moe_tp_size"]
    here = c["num_experts"] / c["moe_ep_size"]
    chosen = c["num_tokens"] * c["topk"] / c["moe_ep_size"]
    work = Work(
        expert_compute=2 * chosen * expert / peak,
        expert_read=here * expert * byte / on.bandwidth,
        expert_tokens=c["num_tokens"],
        expert_share=c["topk"] / c["num_experts"],
    )

    def model(p: Parameters) -> Array:
        read = covered(work, Efficiencies(spread=p["spread"])) * work.expert_read
        return p["call_s"] + _array(roofline(work.expert_compute / p["expert_flops"], read / p["expert_bandwidth"]))

    return model


def _context(rows: Rows, on: Hardware) -> Model:
    c = rows.columns
    pairs = c["isl"] * c["step"] + c["isl"] * (c["isl"] + 1) / 2
    compute = 4 * c["head_dim"] * c["num_heads"] * c["batch_size"] * pairs / on.peak("bf16")
    return lambda p: p["call_s"] + _array(compute / p["attention_flops"])


def _generation(rows: Rows, on: Hardware) -> Model:
    c = rows.columns
    byte, _ = _formats(rows, "kv_cache_dtype", on)
    held = c["batch_size"] * (c["step"] + c["isl"])
    read = held * 2 * c["num_key_value_heads"] * c["head_dim"] * byte / on.bandwidth
    return lambda p: p["call_s"] + p["sequence_s"] * c["batch_size"] + _array(read / p["attention_bandwidth"])


def _allreduce(rows: Rows, on: Hardware) -> Model:
    c = rows.columns
    sent = 2 * (c["num_gpus"] - 1) / c["num_gpus"] * c["message_size"] * ACTIVATION_BYTES / on.link_bandwidth
    return lambda p: p["collective_s"] + _array(sent / p["link"])


def _array(value: Number) -> Array:
    return np.asarray(value, dtype=float)


OPERATORS = {
    "gemm": _Operator("gemm_dtype", ("flops", "bandwidth"), ("call_s",), _gemm),
    "moe": _Operator("moe_dtype", ("expert_flops", "expert_bandwidth", "spread"), ("call_s",), _moe),
    "context_attention": _Operator("kv_cache_dtype", ("attention_flops",), ("call_s",), _context),
    "generation_attention": _Operator(
        "kv_cache_dtype", ("attention_bandwidth",), ("call_s", "sequence_s"), _generation
    ),
    "custom_allreduce": _Operator("allreduce_dtype", ("link", "collective_s"), (), _allreduce),
}
