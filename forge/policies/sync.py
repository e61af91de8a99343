"""Weight sync: when to publish weights to the engines, and what running requests do meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from forge.policies.scheduler import FORBID
from forge.types import ForgeError
from forge.views import SyncView

SyncMode = Literal["in_flight", "drain", "abort"]


class WeightSync(Protocol):
    """Contract: `publish_every` bounds the steps between publications (the queue's validity needs it).

    `decide` is asked after every commit and returns the mode to publish in, or None to wait. "in_flight": engines
    load between two decode steps, running requests go on with their KV. "drain": an engine admits no new request
    until its running ones are done, then loads. "abort": engines load between two decode steps, and running requests
    resume from what they had sampled, with all their KV computed anew by the new weights. The last version of a run
    is always published, unasked.
    """

    @property
    def publish_every(self) -> int: ...

    def decide(self, view: SyncView) -> SyncMode | None: ...


@dataclass(kw_only=True)
class EveryK:
    """Publish every k trainer steps."""

    __pydantic_config__ = FORBID
    kind: Literal["every_k"] = "every_k"
    k: int = 1
    mode: SyncMode = "in_flight"
    #: step of the last publication asked for; a slow one (a drain) may not have happened yet
    _asked: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ForgeError(f"k = {self.k}: must be at least 1")

    @property
    def publish_every(self) -> int:
        return self.k

    def decide(self, view: SyncView) -> SyncMode | None:
        published = view.step - view.steps_unpublished
        if view.step - max(self._asked, published) < self.k:
            return None
        self._asked = view.step
        return self.mode
