"""How long an iteration takes, in whole femtoseconds: what an instance asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forge.cost import CostModel
from sim.clock import to_fs

Chunks = Sequence[tuple[int, int]]


class Times(Protocol):
    """Contract: a decode-only iteration of `rows` requests that hold `context` units of KV together takes
    `a + b * context` fs and samples `gain` units for each, with (a, b, gain) = `line(rows)`; `unit` of them are a
    token. `mixed` is one that also computes chunks of prompts, (tokens, tokens before them) each. Both are positive
    and pure. `run` is what `mixed` says of iterations in a row that compute one of the chunks each, the context growing
    by `grown` units between them.
    """

    @property
    def unit(self) -> int: ...

    def line(self, rows: int) -> tuple[int, int, int]: ...

    def mixed(self, rows: int, context: int, chunks: Chunks) -> int: ...

    def run(self, rows: int, context: int, grown: int, chunks: Chunks) -> list[int]: ...


def one_by_one(times: Times, rows: int, context: int, grown: int, chunks: Chunks) -> list[int]:
    """`Times.run` by `Times.mixed`, for whom no shorter way is known."""
    return [times.mixed(rows, context + i * grown, (chunk,)) for i, chunk in enumerate(chunks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineTimes:
    """`step_s + row_s * requests + prefill_token_s * tokens`: what `forge calibrate` fits to the embedded engine."""

    step_s: float
    row_s: float
    prefill_token_s: float
    unit: int = 1

    def line(self, rows: int) -> tuple[int, int, int]:
        return max(1, to_fs(self.step_s + self.row_s * rows)), 0, self.unit

    def mixed(self, rows: int, context: int, chunks: Chunks) -> int:  # noqa: ARG002 - the contract
        tokens = sum(tokens for tokens, _ in chunks)
        return max(1, to_fs(self.step_s + self.row_s * (rows + len(chunks)) + self.prefill_token_s * tokens))

    def run(self, rows: int, context: int, grown: int, chunks: Chunks) -> list[int]:
        return one_by_one(self, rows, context, grown, chunks)


@dataclass(frozen=True, slots=True)
class SlowTimes:
    """Iterations of `times`, each `factor` times as long: a node that runs hot, or shares what others have alone."""

    times: Times
    factor: float

    @property
    def unit(self) -> int:
        return self.times.unit

    def line(self, rows: int) -> tuple[int, int, int]:
        a, b, gain = self.times.line(rows)
        return round(a * self.factor), round(b * self.factor), gain

    def mixed(self, rows: int, context: int, chunks: Chunks) -> int:
        return round(self.times.mixed(rows, context, chunks) * self.factor)

    def run(self, rows: int, context: int, grown: int, chunks: Chunks) -> list[int]:
        return one_by_one(self, rows, context, grown, chunks)


class RooflineTimes:
    """A deployment's iterations by the cost model. Requests spread evenly over its `dp` replicas."""

    unit = 1

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._dp = cost.on.dp
        self._lines: dict[int, tuple[int, int, int]] = {}

    def line(self, rows: int) -> tuple[int, int, int]:
        line = self._lines.get(rows)
        if line is None:
            a, b = self._cost.line(-(-rows // self._dp))
            line = self._lines[rows] = to_fs(a), to_fs(b / self._dp), 1
        return line

    def mixed(self, rows: int, context: int, chunks: Chunks) -> int:
        if self._dp > 1:
            return self._spread(rows, context, chunks)
        return int(self._cost.iteration(rows, context, chunks) * 1e15)

    def run(self, rows: int, context: int, grown: int, chunks: Chunks) -> list[int]:
        if self._dp > 1:
            return one_by_one(self, rows, context, grown, chunks)
        return [int(s * 1e15) for s in self._cost.run(rows, context, grown, chunks)]

    def _spread(self, rows: int, context: int, chunks: Chunks) -> int:
        """A chunk is on one replica, and the others wait for the slowest: with few chunks one replica has one."""
        dp = self._dp
        mine = chunks[::dp] if len(chunks) > dp else chunks[:1]
        return int(self._cost.iteration(-(-rows // dp), context // dp, mine) * 1e15)
