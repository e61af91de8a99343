"""A request on its way through a cluster, and the way to a prefill instance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from sim.links import Transfer
from sim.request import Request

#: Before its prefill instance; there; its KV between instances; at the instance that decodes it; ended or lost.
Phase = Literal["queued", "prefill", "wire", "decode", "gone"]


class Flight:
    """`first` computes the prompt at `source`; `request` decodes at `target`. -1: none, or not chosen yet.

    `have`: blocks of the prompt that do not cross, because the target holds them. `version`: of the weights that
    computed the KV. `blocks`: what it may come to hold at the source; `tokens`: what its prompt lacks there.
    """

    __slots__ = ("blocks", "first", "have", "phase", "request", "source", "target", "tokens", "transfer", "version")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.first = request
        self.source = self.target = self.version = -1
        self.phase: Phase = "decode"
        self.have = self.blocks = self.tokens = 0
        self.transfer: Transfer | None = None  # None on the wire: no decode instance lives


class Source:
    """A prefill instance is sent what its memory of `capacity` blocks is sure to hold beside the KV it holds for
    others, first come first served. `tokens`: of the prompts that wait here or are computed there."""

    __slots__ = ("_blocks", "_capacity", "_queue", "_send", "tokens")

    def __init__(self, capacity: int, send: Callable[[Flight], None]) -> None:
        self._capacity = capacity
        self._send = send
        self._blocks = self.tokens = 0
        self._queue: deque[Flight] = deque()

    def put(self, flight: Flight) -> None:
        flight.phase = "queued"
        self.tokens += flight.tokens
        self._queue.append(flight)
        self._feed()

    def remove(self, flight: Flight) -> None:
        """It is still queued."""
        self._queue.remove(flight)
        self.tokens -= flight.tokens
        self._feed()

    def computed(self, flight: Flight) -> None:
        self.tokens -= flight.tokens

    def free(self, flight: Flight) -> None:
        """It holds nothing there any more."""
        self._blocks -= flight.blocks
        self._feed()

    def _feed(self) -> None:
        queue = self._queue
        while queue and self._blocks + queue[0].blocks <= self._capacity:
            flight = queue.popleft()
            self._blocks += flight.blocks
            flight.phase = "prefill"
            self._send(flight)
