"""Iterations that draft and verify: several tokens a step for more work a step.

A step of depth k drafts k tokens for every row and verifies them with the row's own next one. A draft counts if it and
all before it are accepted, so with `acceptance[d]` the chance at depth d + 1 given those before,

    E[tokens a step] = 1 + a1 + a1 a2 + ... + a1 ... ak        ((1 - a^(k+1)) / (1 - a) where all are alike),

and the step takes an iteration of rows (k + 1) tokens, whose attention reads every row's KV once, and k draft steps at
`draft_share` of a plain decode step each. So it pays while weights and KV are what an iteration waits for, and costs
where tokens are. Requests advance by the expected number: fluid, in `UNIT`ths of a token, so that jumps stay exact.

Left out: the tokens to verify count against no budget and their KV takes no blocks; attention that is bound by compute
although few tokens are decoded (latent attention on one device).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from forge.policies.speculation import DraftView, Speculation
from forge.types import ForgeError
from sim.clock import FS
from sim.engine import Instance
from sim.iteration import Chunks, Times, one_by_one

UNIT = 256  # of a token


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What drafts, at most as many tokens as `acceptance` has. `drift`: acceptance falls by `exp(-drift)` with every
    weights version since the head was trained (version 0), unless the head `follows` the weights. Where depths are
    weighed, rows are taken to hold `context` tokens each."""

    acceptance: tuple[float, ...]
    draft_share: float = 0.05
    drift: float = 0.0
    follows: bool = False
    context: int = 4096

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= chance <= 1 for chance in self.acceptance):
            raise ForgeError(f"acceptance = {list(self.acceptance)}: give chances in [0, 1], one for every depth")
        if self.draft_share < 0 or self.drift < 0 or self.context < 0:
            raise ForgeError("draft_share, drift, context: must not be negative")

    def tokens(self, depth: int, version: int) -> float:
        """Expected of a step, on weights of `version`."""
        kept = 1.0 if self.follows else math.exp(-self.drift * version)
        return 1.0 + sum(accumulate([chance * kept for chance in self.acceptance[:depth]], mul), 0.0)


class SpeculativeTimes:
    """`times`, whose unit is the token, with a head and a policy that says how deep it drafts. One for each instance,
    which it must `follow`: the weights it serves decide how many drafts are accepted."""

    unit = UNIT

    def __init__(self, times: Times, head: Head, policy: Speculation) -> None:
        if times.unit != 1:
            raise ForgeError("speculation on iterations that speculate already: give it plain ones")
        self._times = times
        self._head = head
        self._policy = policy
        self._instance: Instance | None = None
        self._version = 0
        self._lines: dict[int, tuple[int, int, int]] = {}
        self._depths: dict[int, int] = {}

    def follow(self, instance: Instance) -> None:
        self._instance = instance

    def depth(self, rows: int) -> int:
        """Tokens to draft for each of `rows`."""
        self._renew()
        if rows not in self._depths:
            self._depths[rows] = self._choose(rows)
        return self._depths[rows]

    def line(self, rows: int) -> tuple[int, int, int]:
        self._renew()
        line = self._lines.get(rows)
        if line is None:
            depth = self.depth(rows)
            a, b = self._step(rows, depth)
            gain = round(self._head.tokens(depth, self._version) * UNIT)
            line = self._lines[rows] = a, round(b / UNIT), gain
        return line

    def mixed(self, rows: int, context: int, chunks: Chunks) -> int:
        depth, held = self.depth(rows), context // UNIT
        verified = self._times.mixed(rows * (depth + 1), held, chunks)
        if not depth:
            return verified
        a, b, _ = self._times.line(rows)
        return verified + round(depth * self._head.draft_share * (a + b * held))

    def run(self, rows: int, context: int, grown: int, chunks: Chunks) -> list[int]:
        return one_by_one(self, rows, context, grown, chunks)

    # --- inside ------

    def _renew(self) -> None:
        version = self._instance.version if self._instance is not None else 0
        if version != self._version:
            self._version = version
            self._lines, self._depths = {}, {}

    def _step(self, rows: int, depth: int) -> tuple[int, float]:
        """(a, b): a decode-only step takes a + b * tokens of KV."""
        a, b, _ = self._times.line(rows * (depth + 1))
        if not depth:
            return a, b
        one_a, one_b, _ = self._times.line(rows)
        drafts = depth * self._head.draft_share
        return round(a + drafts * one_a), b + drafts * one_b

    def _choose(self, rows: int) -> int:
        if not rows:
            return 0
        head, depths = self._head, range(len(self._head.acceptance) + 1)
        steps = [self._step(rows, depth) for depth in depths]
        view = DraftView(
            rows=rows,
            tokens=tuple([head.tokens(depth, self._version) for depth in depths]),
            step_s=tuple([(a + b * rows * head.context) / FS for a, b in steps]),
        )
        return self._policy.depth(view)
