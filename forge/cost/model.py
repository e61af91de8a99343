"""`CostModel`: seconds of an iteration, of many in closed form, of chunks in a row, on one deployment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import pow
from pathlib import Path
from typing import Final

import numpy as np

from forge.cost.calibration import load_calibration
from forge.cost.operators import (
    OF_HEADS,
    OF_TOKENS,
    SHARPNESS,
    Deployment,
    Efficiencies,
    Work,
    device_seconds,
    pair_flops,
    seconds,
    work,
)

#: Of the smooth maximum. Not the constant itself: a compiled module would keep its value when that one changes.
POWER: Final = float(SHARPNESS)
ROOT: Final = 1.0 / POWER
Constants = tuple[float, float, int, float, float, float, float, float, float]


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
    _kept: list[Constants] = field(default_factory=list, init=False, repr=False, compare=False)
    _lines: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _tokens: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    _heads: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def from_toml(cls, path: Path, on: Deployment, deployment: str = "") -> CostModel:
        """With what `forge calibrate` wrote of `deployment`, by default the file's only one."""
        found = load_calibration(path, deployment)
        return cls(on, found.efficiencies, found.decode_factor, found.prefill_factor, dict(found.error))

    def iteration(self, rows: int = 0, context: int = 0, prefill: Sequence[tuple[int, int]] = ()) -> float:
        """One engine iteration: a token for each of `rows` sequences that hold `context` tokens together, and chunks
        of prefill, (new tokens, tokens before them) each."""
        a, b = self.line(rows)
        decode = a + b * context
        if not prefill:
            return decode
        pair_s, seen_s, window, window_s, context_s, step_s, launch, per_decode, added = self._constants()
        tokens, device = rows, rows * window_s + context * context_s
        for new, before in prefill:
            tokens += new
            pairs = new * before + new * (new + 1) / 2
            device += pairs * pair_s
            if window:
                device += min(pairs, new * window) * seen_s
        device += self._of_tokens(tokens) + self._of_heads(rows + len(prefill))
        mixed: float = step_s + pow(pow(device, POWER) + launch, ROOT)
        return decode + added * (mixed - decode * per_decode)

    def run(self, rows: int, context: int, grown: int, prefill: Sequence[tuple[int, int]]) -> list[float]:
        """Iterations in a row, a chunk in each, the context growing by `grown` between them: what `iteration` says of
        each, to the last bit, for a fraction of the time."""
        a, b = self.line(rows)
        pair_s, seen_s, window, window_s, context_s, step_s, launch, per_decode, added = self._constants()
        heads, of_window, size, fixed, out = self._of_heads(rows + 1), rows * window_s, -1, 0.0, []
        for new, before in prefill:
            decode = a + b * context
            pairs = new * before + new * (new + 1) / 2
            device = of_window + context * context_s + pairs * pair_s
            if window:
                device += min(pairs, new * window) * seen_s
            if new != size:
                size, fixed = new, self._of_tokens(rows + new) + heads
            device += fixed
            mixed: float = step_s + pow(pow(device, POWER) + launch, ROOT)
            out.append(decode + added * (mixed - decode * per_decode))
            context += grown
        return out

    def _constants(self) -> Constants:
        """Seconds of a (query, key) pair in prefill, over all pairs and over those inside the window; the window;
        seconds of the windowed layers' attention for a decoding sequence, and of a token of context; of an iteration;
        what the host needs to launch one with prefill, as the smooth maximum wants it; the two factors as they apply.
        Kept once computed."""
        if self._kept:
            return self._kept[0]
        on, by = self.on, self.by
        every, windowed = pair_flops(on)
        rate = on.hardware.peak("bf16") * by.attention_flops
        own = [every / rate, windowed / rate, work(on, 1).generation_attention / by.attention_bandwidth]
        pair_s, seen_s, window_s = map(float, own)
        context_s = self.line(0)[1] / self.decode_factor
        launch = float((on.model.layers * by.launch_s) ** SHARPNESS)
        factors = 1.0 / self.decode_factor, self.prefill_factor
        self._kept.append((pair_s, seen_s, on.model.window, window_s, context_s, float(by.step_s), launch, *factors))
        return self._kept[0]

    def _of_tokens(self, tokens: int) -> float:
        """Device seconds of what depends on how many tokens there are and not whose: a table, made when first asked."""
        if tokens >= len(self._tokens):
            many = np.arange(2 * max(1024, tokens), dtype=float)
            one = work(self.on, 0, 0, [(1, 0)])
            all_of = {f.name: getattr(one, f.name) for f in fields(Work) if f.name not in OF_HEADS}
            scaled = {name: value * many if name in OF_TOKENS else value for name, value in all_of.items()}
            table = device_seconds(Work(**(scaled | {"context_attention": 0.0})), self.by)
            self._tokens[:] = np.asarray(table).tolist()
        return self._tokens[tokens]

    def _of_heads(self, heads: int) -> float:
        """Device seconds of what depends on how many sequences want logits; kept once computed."""
        if heads not in self._heads:
            whole = work(self.on, heads)
            own = Work(**{name: getattr(whole, name) for name in OF_HEADS})
            self._heads[heads] = float(device_seconds(own, self.by))
        return self._heads[heads]

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
