"""A policy that says what a script tells it to, behind the gateway: what agent programs of others are tried against.

It reads its prompt as turns, by the markers of the fake codec, one token a byte; so usage is honest and large.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

from forge.gateway.backend import Overloaded, UnknownTrajectoryError
from forge.gateway.fake_chat import END, Turn, turns
from forge.gateway.report import Report
from forge.rollout.engine import Delta, FinishReason, Sampling
from forge.types import Completion

#: what a request meets instead of an answer, or before it
Fault = Literal["429", "500", "stall"]
#: seconds: what a refused client is told to wait, and what a stalled one has to
RETRY_AFTER_S, STALL_S = 1.0, 6.0
#: tokens a delta
_CHUNK = 32


Script = Callable[[Sequence[Turn]], str]


class ScriptedPolicy:
    """A `Backend` of the gateway. `faults` are met by the next requests, one each; `asked` counts what came."""

    model = "forge-model"
    fault: str | None = None

    def __init__(self, script: Script, *, max_context: int = 2_000_000) -> None:
        self.max_context = max_context
        self.faults: deque[Fault] = deque()
        self.asked: Counter[str] = Counter()
        self.records: defaultdict[str, list[Completion]] = defaultdict(list)
        self._script = script

    def now(self) -> float:
        return time.monotonic()

    def open(self, trajectory: str) -> Sampling:
        self.asked[trajectory] += 1
        if self.faults and self.faults[0] == "429":
            self.faults.popleft()
            raise Overloaded(RETRY_AFTER_S)
        return Sampling(max_tokens=100_000)

    def record(self, completion: Completion) -> None:
        self.records[completion.trajectory].append(completion)

    def report(self, trajectory: str, report: Report) -> None:  # noqa: ARG002 - nobody here waits for one
        raise UnknownTrajectoryError(trajectory)

    async def generate(
        self,
        trajectory: str,  # noqa: ARG002
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        if self.faults:
            if self.faults.popleft() == "500":
                raise RuntimeError("the engine broke, as it was told to")
            await asyncio.sleep(STALL_S)
        ids = [*self._script(turns(prompt_ids)).encode(), END][: sampling.max_tokens]
        for at in range(0, len(ids), _CHUNK):
            part = tuple(ids[at : at + _CHUNK])
            n, last = len(part), at + _CHUNK >= len(ids)
            finish: FinishReason | None = ("stop" if ids[-1] == END else "length") if last else None
            yield 0, Delta(id="s", token_ids=part, logprobs=(-0.5,) * n, versions=(0,) * n, finish=finish)
            await asyncio.sleep(0.002)
