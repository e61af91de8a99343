"""What a calibration found, in TOML: efficiencies, factors and error bars, by deployment.

    [deployments."Qwen3-32B h100_sxm vllm 0.16.0 fp8 TP2"]
    efficiencies = { flops = 0.61, bandwidth = 0.78 }   # fields of `Efficiencies`, those absent at their defaults
    factors = { decode = 1.02, prefill = 0.94 }         # 1 where absent
    error = { ttft = 0.21, tpot = 0.08 }                # relative error bars, none where absent

Unknown keys and impossible values are errors that name file and key.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forge.cost.operators import Efficiencies
from forge.types import ForgeError

FACTORS, METRICS = ("decode", "prefill"), ("ttft", "tpot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Of one deployment. `error`: by metric, the share that a measurement may be off either way; see `CostModel`."""

    efficiencies: Efficiencies = field(default_factory=Efficiencies)
    decode_factor: float = 1.0
    prefill_factor: float = 1.0
    error: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """As TOML has it. An infinite bar (too little was left out to say) is left out."""
        return {
            "efficiencies": {name: float(value) for name, value in asdict(self.efficiencies).items()},
            "factors": {"decode": self.decode_factor, "prefill": self.prefill_factor},
            "error": {name: value for name, value in self.error.items() if math.isfinite(value)},
        }


def load_calibration(path: Path, deployment: str = "") -> Calibrated:
    """The deployment of that name; without one, the only one there is. Raises ForgeError naming file and key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ForgeError(f"{path}: not a readable TOML file: {error}") from None
    _known(path, "", data, ("deployments",))
    every = _table(path, "deployments", data.get("deployments", {}))
    if not deployment and len(every) == 1:
        (deployment,) = every
    if deployment not in every:
        asked = f"{deployment}: no such deployment" if deployment else "name a deployment"
        raise ForgeError(f"{path}: {asked}; it has {'; '.join(sorted(every)) or 'none'}")
    key = f"deployments.{deployment}"
    one = _table(path, key, every[deployment])
    _known(path, f"{key}.", one, ("efficiencies", "factors", "error"))
    factors = _numbers(path, f"{key}.factors", one, FACTORS)
    return Calibrated(
        efficiencies=Efficiencies(**_numbers(path, f"{key}.efficiencies", one, [f.name for f in fields(Efficiencies)])),
        decode_factor=factors.get("decode", 1.0),
        prefill_factor=factors.get("prefill", 1.0),
        error=_numbers(path, f"{key}.error", one, METRICS),
    )


def _numbers(path: Path, key: str, of: Mapping[str, Any], known: list[str] | tuple[str, ...]) -> dict[str, float]:
    """A table of positive numbers."""
    table = _table(path, key, of.get(key.rpartition(".")[2], {}))
    _known(path, f"{key}.", table, known)
    for name, value in table.items():
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise ForgeError(f"{path}: {key}.{name} = {value!r}: must be a positive number")
    return {name: float(value) for name, value in table.items()}


def _table(path: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ForgeError(f"{path}: {key} = {value!r}: must be a table")
    return value


def _known(path: Path, before: str, table: Mapping[str, Any], known: list[str] | tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise ForgeError(f"{path}: {before}{name}: unknown key; known are {', '.join(known)}")
