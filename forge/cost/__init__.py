"""Seconds of engine iterations: one cost model for the live router and the simulator. Pure: numpy only.

    on = Deployment(model=model_card("qwen3_32b"), hardware=hardware("h200_sxm"), tp=2)
    cost = CostModel(on)
    cost.iteration(rows=16, context=40_000, prefill=[(512, 1024)])
    cost.decode(rows=16, context=40_000, iterations=100)  # closed form, equal to 100 iterations

`cards` are the descriptions in TOML, `operators` the roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forge.cost.cards import Hardware, ModelCard, hardware, model_card
from forge.cost.operators import Deployment, Efficiencies, Precision, Work, seconds, work

__all__ = [
    "CostModel",
    "Deployment",
    "Efficiencies",
    "Hardware",
    "ModelCard",
    "Precision",
    "Work",
    "hardware",
    "model_card",
    "seconds",
    "work",
]


@dataclass(frozen=True)
class CostModel:
    """Seconds on one deployment with scalar efficiencies.

    `decode_factor` and `prefill_factor` scale decode iterations and what prefill adds to them: what a calibration found
    to be special to a model on an engine. `error`: the relative error bar it learnt, by metric; empty without one.
    """

    on: Deployment
    by: Efficiencies = field(default_factory=Efficiencies)
    decode_factor: float = 1.0
    prefill_factor: float = 1.0
    error: dict[str, float] = field(default_factory=dict)
    _lines: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def iteration(self, rows: int = 0, context: int = 0, prefill: Sequence[tuple[int, int]] = ()) -> float:
        """One engine iteration: a token for each of `rows` sequences that hold `context` tokens together, and chunks
        of prefill, (new tokens, tokens before them) each."""
        a, b = self.line(rows)
        decode = a + b * context
        if not prefill:
            return decode
        mixed = float(seconds(work(self.on, rows, context, prefill), self.by))
        return decode + self.prefill_factor * (mixed - decode / self.decode_factor)

    def line(self, rows: int) -> tuple[float, float]:
        """(a, b): a decode-only iteration of `rows` sequences takes `a + b * context` seconds. Kept once computed."""
        if rows not in self._lines:
            a = float(seconds(work(self.on, rows), self.by))
            token_s = float(work(self.on, 0, 1).generation_attention / self.by.attention_bandwidth)
            self._lines[rows] = (self.decode_factor * a, self.decode_factor * token_s)
        return self._lines[rows]

    def decode(self, rows: int, context: int, iterations: int) -> float:
        """`iterations` decode-only ones of a fixed batch, every sequence growing by a token in each."""
        a, b = self.line(rows)
        k = iterations
        return k * a + b * (k * context + rows * (k * (k - 1) // 2))

    def prefill(self, tokens: int, before: int = 0) -> float:
        """A prompt's last `tokens` in one iteration of their own, after `before` tokens that are cached."""
        return self.iteration(prefill=[(tokens, before)])

    def transfer(self, tokens: int, bandwidth: float, overhead: float = 0.0) -> float:
        """Moving the KV of `tokens` over a link of `bandwidth` bytes/s a device (tokens * kv / BW + overhead)."""
        return tokens * self.on.kv_bytes / bandwidth + overhead
