"""Replay of real vLLM runs, request by request (`vllm_measured/*`): when each would have had its first and last token.

The simulator serves a run's requests (`sim.serve`). A few efficiencies are calibrated on every second of them, and the
others are scored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge.cost import CostModel, Deployment, Efficiencies, hardware, model_card
from forge.policies.router import RoundRobin
from forge.types import ForgeError, Json
from sim.clock import to_s
from sim.engine import Instance, Shape
from sim.iteration import RooflineTimes
from sim.robust import robust_fit, slopes_by_difference
from sim.serve import Serving
from sim.sessions import Session, Step
from sim.traces.reading import Recorded

Array = NDArray[np.float64]

FOLDER = "vllm_measured"
BLOCK = 16  # tokens of a KV block, vLLM's default
HARDWARE = {"RTX4090": "rtx_4090", "RTXPRO6000": "rtx_pro_6000"}
#: What is calibrated, and sigma of its log around the defaults of `Efficiencies`.
CALIBRATED = {"bandwidth": 0.1, "flops": 0.3, "attention_bandwidth": 0.2, "step_s": 0.7, "row_s": 0.7}
NOISE = 0.1  # of a log residual
STEP = 0.1  # of the forward difference, in logs: finish times are rough in the parameters at a smaller scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Seconds from the start of the run; tokens."""

    arrival_s: float
    prompt: int
    output: int
    first_s: float
    last_s: float

    @property
    def metrics(self) -> tuple[float, float, float]:
        """TTFT, TPOT, end to end."""
        return (
            self.first_s - self.arrival_s,
            (self.last_s - self.first_s) / max(1, self.output - 1),
            self.last_s - self.arrival_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured run and the engine it ran on. `kv_tokens`: None where the run does not say."""

    name: str
    on: Deployment
    token_budget: int
    sequences: int
    kv_tokens: int | None
    requests: tuple[Request, ...]


def load(data: Path) -> list[Run]:
    """Every run below a data folder. Raises ForgeError for one that cannot be read."""
    folders = sorted(path.parent for path in (data / FOLDER).glob("*/requests.jsonl"))
    if not folders:
        raise ForgeError(f"{data / FOLDER}: no run in it; each is a folder with requests.jsonl and meta.json")
    return [_load(folder) for folder in folders]


def _load(folder: Path) -> Run:
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
        rows = sorted((json.loads(line) for line in lines if line), key=lambda row: float(row["queued_ts"]))
        start = rows[0]["queued_ts"]
        requests = tuple(
            Request(
                arrival_s=row["queued_ts"] - start,
                prompt=row["input_toks"],
                output=row["output_toks"],
                first_s=row["first_token_ts"] - start,
                last_s=row["last_token_ts"] - start,
            )
            for row in rows
        )
        engine = meta["engine_kwargs"]
        card = HARDWARE.get(folder.name.split("_")[0], folder.name.split("_")[0])
        on = Deployment(
            model=model_card(engine["model"]), hardware=hardware(card), tp=int(engine["tensor_parallel_size"])
        )
        return Run(
            name=folder.name,
            on=on,
            token_budget=int(engine["max_num_batched_tokens"]),
            sequences=int(engine["max_num_seqs"]),
            kv_tokens=(meta.get("kv_cache") or {}).get("num_kv_tokens"),
            requests=requests,
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, ForgeError):
            raise
        raise ForgeError(f"{folder}: not a measured run: {type(error).__name__}: {error}") from None


def replay(run: Run, cost: CostModel) -> list[Request]:
    """The run's requests with the times that the simulator gives them on one instance. Raises ForgeError for one that
    does not fit there."""
    sessions = [
        Session(name=str(i), start_s=one.arrival_s, steps=(Step(prompt=one.prompt, output=one.output),))
        for i, one in enumerate(run.requests)
    ]
    capacity = run.kv_tokens if run.kv_tokens is not None else int(run.on.kv_tokens)
    shape = Shape(block=BLOCK, capacity=capacity // BLOCK, budget=run.token_budget, seats=run.sequences)
    instance = Instance(RooflineTimes(cost), shape)
    rows = sorted(Serving(Recorded(BLOCK, tuple(sessions)), [instance], RoundRobin()).run())
    return [
        replace(one, first_s=to_s(row.first), last_s=to_s(row.ended))
        for one, row in zip(run.requests, rows, strict=True)
    ]


def calibrate(run: Run) -> CostModel:
    """Efficiencies from every second request's TTFT and TPOT; from those alone."""
    names, sigma = list(CALIBRATED), np.array(list(CALIBRATED.values()))
    base = Efficiencies()

    def model(betas: Array) -> CostModel:
        fitted = {name: getattr(base, name) * float(np.exp(b)) for name, b in zip(names, betas, strict=True)}
        return CostModel(run.on, replace(base, **fitted))

    def residuals(betas: Array) -> Array:
        pairs = zip(replay(run, model(betas))[::2], run.requests[::2], strict=True)
        logs = [np.log(np.divide(ours.metrics[:2], theirs.metrics[:2])) for ours, theirs in pairs]
        return np.concatenate(logs) / NOISE

    return model(robust_fit(residuals, slopes_by_difference(residuals, STEP), sigma, enough=1e-3))


def score(run: Run) -> Json:
    """Relative errors of mean TTFT, TPOT and end to end over the requests not calibrated on; and untuned, over all."""
    errors: Json = {"run": run.name, "requests": len(run.requests)}
    for label, cost, part in (("", calibrate(run), slice(1, None, 2)), ("untuned_", CostModel(run.on), slice(None))):
        ours, theirs = replay(run, cost)[part], run.requests[part]
        for i, metric in enumerate(("ttft", "tpot", "e2e")):
            means = [fmean(one.metrics[i] for one in side) for side in (ours, theirs)]
            errors[f"{label}{metric}_error"] = means[0] / means[1] - 1.0
    return errors
