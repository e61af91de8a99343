"""Prefixes that instances fetch from one another before a request begins: what a KV-centric router asks for.

Unlike the KV of a request on its way to a decode instance, what was fetched is an ordinary, loose prefix: others hit it
too, and it goes when room is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forge.types import ForgeError
from sim.alarm import HAPPEN, Alarm
from sim.clock import to_fs
from sim.front import Front
from sim.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """Network between instances: seconds of a KV block on a sender's cards, and `latency_s` of any transfer."""

    block_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.block_s < 0 or self.latency_s < 0:
            raise ForgeError(f"block_s, latency_s = {self.block_s}, {self.latency_s}: must not be negative")


class Fetches:
    """Transfers under way. A sender serves them one after another, so that a hot prefix on one instance is a queue;
    receivers do not hold each other up. `blocks`, `count`: of all that began."""

    def __init__(self, env: Any, fleet: Front, fabric: Fabric) -> None:
        self._env = env
        self._fleet = fleet
        self._block_fs, self._latency_fs = to_fs(fabric.block_s), to_fs(fabric.latency_s)
        self._free = [0] * len(fleet.instances)  # when a sender is done with all it has promised
        self.blocks = 0
        self.count = 0

    def begin(self, source: int, target: int, request: Request) -> None:
        """The request joins the target once the longest prefix that `source` has of it is there too. What the source
        holds now is sent, whatever becomes of it meanwhile; nothing, where it holds no more than the target."""
        now: int = self._env.now
        instances = self._fleet.instances
        for i in (source, target):
            instances[i].sync(now)
        blocks = instances[source].cache.match(request.path)
        new = blocks - instances[target].cache.match(request.path)
        if new <= 0:
            self._fleet.add(target, request)
            return
        self.blocks += new
        self.count += 1
        self._free[source] = max(now, self._free[source]) + new * self._block_fs
        arrival = Alarm(self._env, HAPPEN, lambda _: self._arrive(target, request, blocks))
        arrival.set(self._free[source] + self._latency_fs)

    def _arrive(self, target: int, request: Request, blocks: int) -> None:
        self._fleet.insert(target, request.path, blocks)
        self._fleet.add(target, request)
