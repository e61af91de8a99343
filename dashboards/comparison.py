"""The figures of one run, or of two beside each other with the difference in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forge.report.page import between, number, with_unit
from forge.report.prediction import lookup
from forge.types import Json

SMALL = 0.005  # a difference that is told as none


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A key of `summary.json` (inner ones dotted). `more`: whether more is better; None: neither is. `group`: under
    which heading."""

    key: str
    label: str
    unit: str
    more: bool | None
    group: str


J, SPEED, LAG, SERVING = "J and its factors", "Throughput", "Lag and bias", "Serving"
FIGURES = (
    Figure(key="j_tokens", label="J, modelled", unit="tokens/s", more=True, group=J),
    Figure(key="trained_tokens_per_s", label="Trained tokens", unit="1/s", more=True, group=J),
    Figure(key="sample_efficiency_model", label="Sample efficiency, modelled", unit="", more=True, group=J),
    Figure(key="yield_J", label="J, measured (reward)", unit="", more=True, group=J),
    Figure(key="reward_gain", label="Reward gained", unit="", more=True, group=J),
    Figure(key="reward_gain_per_s", label="Reward gained a second", unit="", more=True, group=J),
    Figure(key="update_variance", label="Variance of updates", unit="", more=False, group=J),
    Figure(key="plateau_distance", label="Distance from the plateau", unit="", more=False, group=J),
    Figure(key="throughput_tokens_per_s", label="All tokens", unit="1/s", more=True, group=SPEED),
    Figure(key="items_per_s", label="Items consumed", unit="1/s", more=True, group=SPEED),
    Figure(key="steps", label="Trainer steps", unit="", more=None, group=SPEED),
    Figure(key="engine_idle_fraction", label="Engines idle", unit="share", more=False, group=SPEED),
    Figure(key="trainer_idle_fraction", label="Trainer idle", unit="share", more=False, group=SPEED),
    Figure(key="lag_items_max", label="Lag, largest", unit="items", more=False, group=LAG),
    Figure(key="lag_items_bound", label="Lag, bound", unit="items", more=False, group=LAG),
    Figure(key="lag_items_mean", label="Lag, mean", unit="items", more=False, group=LAG),
    Figure(key="nonstationarity", label="Non-stationarity (1 is chance)", unit="", more=False, group=LAG),
    Figure(key="mean_shift_first_n.log_length", label="First N are longer by", unit="sd", more=None, group=LAG),
    Figure(key="ttft_s.p50", label="Time to first token, median", unit="s", more=False, group=SERVING),
    Figure(key="ttft_s.p99", label="Time to first token, p99", unit="s", more=False, group=SERVING),
    Figure(key="tpot_s.p50", label="Time per output token, median", unit="s", more=False, group=SERVING),
    Figure(key="tpot_s.p99", label="Time per output token, p99", unit="s", more=False, group=SERVING),
    Figure(key="cached_share", label="Prompt tokens found cached", unit="share", more=True, group=SERVING),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure in words: of each run, and of the second against the first."""

    group: str
    label: str
    values: tuple[str, ...]
    difference: str
    better: bool | None


def rows(*summaries: Json, of: Sequence[Figure] = FIGURES) -> list[Row]:
    """One or two runs. Figures that none of them has are left out."""
    found = []
    for figure in of:
        values = [_value(summary, figure.key) for summary in summaries]
        if all(value is None for value in values):
            continue
        texts = tuple(_text(value, figure.unit) for value in values)
        difference, better = _difference(figure, *values) if len(values) == 2 else ("", None)
        unit = f" ({figure.unit})" if figure.unit not in ("", "share") else ""
        found.append(Row(figure.group, figure.label + unit, texts, difference, better))
    return found


def unknown(summary: Json) -> dict[str, str]:
    """Why figures of the table are not known, by their label."""
    reasons = summary.get("null_reasons", {})
    return {
        figure.label: reasons[figure.key]
        for figure in FIGURES
        if _value(summary, figure.key) is None and figure.key in reasons
    }


Known = float | tuple[float, float] | None


def _value(summary: Json, key: str) -> Known:
    held: Any = summary.get(key)
    if isinstance(held, dict) and {"low", "high"} <= set(held):
        return (float(held["low"]), float(held["high"])) if held["low"] is not None else None
    return lookup(summary, key)


def _text(value: Known, unit: str) -> str:
    if isinstance(value, tuple):
        return between(*value)
    return with_unit(value, unit)


def _difference(figure: Figure, a: Known, b: Known) -> tuple[str, bool | None]:
    if a is None or b is None:
        return "", None
    if isinstance(a, tuple) or isinstance(b, tuple):
        return _of_intervals(a, b)
    if figure.unit == "share":
        change, text = b - a, f"{100 * (b - a):+.1f} points"
    elif figure.unit == "sd":  # around 0, so no ratio says anything
        change, text = b - a, f"{b - a:+.2f} sd"
    elif a == 0:
        change, text = b, f"{number(b)} more" if b else ""
    else:
        change, text = b / a - 1, f"{100 * (b / a - 1):+.1f}%"
    if abs(change) < SMALL:
        return "same", None
    better = None if figure.more is None else (change > 0) == figure.more
    return text, better


def _of_intervals(a: Known, b: Known) -> tuple[str, bool | None]:
    assert isinstance(a, tuple)
    assert isinstance(b, tuple)
    if b[0] > a[1] or a[0] > b[1]:
        return "intervals apart", b[0] > a[1]
    return "intervals overlap: no winner", None
