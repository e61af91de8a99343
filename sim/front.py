"""Where requests go: the instances (`sim.fleet`), or what stands before them (`sim.cluster`, `sim.tiers`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from sim.engine import Instance, Load
from sim.fleet import Listener
from sim.request import Request
from sim.sessions import Path


class Front(Protocol):
    """What `sim.fleet.Fleet` does. `instances` are those that requests are sent to, and that routers know."""

    @property
    def instances(self) -> Sequence[Instance]: ...

    def add(self, i: int, request: Request) -> None: ...

    def cancel(self, i: int, request: Request) -> bool: ...

    def load(self, i: int, load: Load) -> None: ...

    def crash(self, i: int) -> list[Request]: ...

    def up(self, i: int, version: int) -> None: ...

    def insert(self, i: int, path: Path, blocks: int) -> None: ...

    def forget(self, chains: list[int]) -> None: ...


class Inner(Front, Protocol):
    """A front that a cluster can stand before: one to one with the instances it has."""

    def let_go(self, i: int, request: Request) -> None: ...


#: Makes one in a SimPy environment.
Build = Callable[[Any, Listener], Front]
