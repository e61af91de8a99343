"""Sessions: requests that wait for one another, as traces and generators hand them to the simulator.

A path says which KV blocks a prompt consists of. A *chain* is a run of blocks under one id; a path takes the first
`blocks` of each of its chains. A conversation grows one chain; what several share (a system prompt, a group's prompt, a
context up to a fork) is a chain of its own. So a request of twenty thousand tokens is two or three pairs.

Output lengths are the hidden truth: instances read them, no policy does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

Path = tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True, init=False)
class Step:
    """One request, not to be changed. `prompt` and `output` in tokens, at least 1 each.

    `path`: (chain, blocks) pairs; together at most `prompt // block` blocks. A chain's length never decreases from one
    step to a later one that uses it: a fork in the middle is written as two chains. Only the last pair
    may have 0 blocks.
    `keep`: the answer's KV goes on the last chain (the next step's prompt contains it).
    `after`: indices of earlier steps of the session whose answers it waits for; () waits for the session's start.
    `delay_s`: seconds from then to the request (tool wait, think time).
    """

    prompt: int
    output: int
    path: Path = ()
    keep: bool = False
    after: tuple[int, ...] = ()
    delay_s: float = 0.0

    def __init__(  # by hand: compiled, it costs a twentieth of the generated one, and there are ten million
        self,
        *,
        prompt: int,
        output: int,
        path: Path = (),
        keep: bool = False,
        after: tuple[int, ...] = (),
        delay_s: float = 0.0,
    ) -> None:
        self.prompt = prompt
        self.output = output
        self.path = path
        self.keep = keep
        self.after = after
        self.delay_s = delay_s


class Frontier:
    """Which steps of a session may begin as answers come in. `left`: steps not yet answered."""

    __slots__ = ("_missing", "_waiting", "left")

    def __init__(self, steps: tuple[Step, ...]) -> None:
        self._missing = [len(step.after) for step in steps]
        self._waiting: dict[int, list[int]] = {}  # steps by one whose answer they wait for
        for number, step in enumerate(steps):
            for earlier in step.after:
                self._waiting.setdefault(earlier, []).append(number)
        self.left = len(steps)

    def first(self) -> list[int]:
        """Those that wait for the session's start alone."""
        return [number for number, missing in enumerate(self._missing) if not missing]

    def answered(self, number: int) -> list[int]:
        """That step was answered; returns those that waited for nothing else."""
        self.left -= 1
        free = []
        for later in self._waiting.get(number, ()):
            self._missing[later] -= 1
            if not self._missing[later]:
                free.append(later)
        return free


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`start_s` from the beginning of the trace; a closed loop starts sessions when a slot is free and ignores it."""

    name: str
    start_s: float
    steps: tuple[Step, ...]


class Trace(Protocol):
    """A workload to replay. `block`: tokens of a KV block that paths are written in. Sessions come by `start_s`."""

    @property
    def block(self) -> int: ...

    def sessions(self) -> Iterator[Session]: ...
