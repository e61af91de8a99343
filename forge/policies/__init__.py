"""The policy slots. A policy is a keyword-only dataclass that is its own configuration, chosen by `kind` in TOML.

Adding one: write the class in its slot's module, add it to the slot's union there. Both worlds run the same object.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from pydantic import Discriminator

from forge.policies.dispatch import Dispatch, Mixed, Paced, ReplaceDead, Staged
from forge.policies.kv import ComesBack, KvRetention, Lru
from forge.policies.placement import Aggregated, Conditional, Disaggregated, LeastDelay, Placement
from forge.policies.router import LeastLoaded, Random, RoundRobin, Router
from forge.policies.router_published import CacheAware, Dynamo, Llmd, PrefixAffinity, Sglang, VllmDp
from forge.policies.router_seconds import Seconds
from forge.policies.scheduler import Fffo, Greedy, Parking, StrictFifo, TrainScheduler, WindowedFifo
from forge.policies.scheduler_adaptive import AdaptiveWindow
from forge.policies.speculation import CostAware, Fixed, Off, Speculation
from forge.policies.sync import EveryK, WeightSync

AnyScheduler = Annotated[StrictFifo | Greedy | Fffo | WindowedFifo | AdaptiveWindow, Discriminator("kind")]
AnyRouter = Annotated[
    RoundRobin | Random | LeastLoaded | CacheAware | Sglang | Dynamo | Llmd | VllmDp | PrefixAffinity | Seconds,
    Discriminator("kind"),
]
AnySync = EveryK
AnyDispatch = Annotated[Mixed | Staged | ReplaceDead | Paced, Discriminator("kind")]
AnyPlacement = Annotated[Aggregated | Disaggregated | Conditional | LeastDelay, Discriminator("kind")]
AnyKv = Annotated[Lru | ComesBack, Discriminator("kind")]
AnySpeculation = Annotated[Off | Fixed | CostAware, Discriminator("kind")]


@dataclass(kw_only=True)
class Policies:
    """One policy per slot: what `policy.toml` holds and what a run deploys."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic reads it

    scheduler: AnyScheduler = field(default_factory=WindowedFifo)
    router: AnyRouter = field(default_factory=LeastLoaded)
    sync: AnySync = field(default_factory=EveryK)
    placement: AnyPlacement = field(default_factory=Conditional)
    speculation: AnySpeculation = field(default_factory=CostAware)
    kv: AnyKv = field(default_factory=Lru)
    dispatch: AnyDispatch = field(default_factory=Mixed)

    def fresh(self) -> Policies:
        """New instances of the same configuration: what an earlier run left inside them is gone."""
        return Policies(**{slot: replace(policy) for slot, policy in self.slots().items()})

    def slots(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}


__all__ = [
    "AdaptiveWindow",
    "Aggregated",
    "AnyDispatch",
    "AnyKv",
    "AnyPlacement",
    "AnyRouter",
    "AnyScheduler",
    "AnySpeculation",
    "AnySync",
    "CacheAware",
    "ComesBack",
    "Conditional",
    "CostAware",
    "Disaggregated",
    "Dispatch",
    "Dynamo",
    "EveryK",
    "Fffo",
    "Fixed",
    "Greedy",
    "KvRetention",
    "LeastDelay",
    "LeastLoaded",
    "Llmd",
    "Lru",
    "Mixed",
    "Off",
    "Paced",
    "Parking",
    "Placement",
    "Policies",
    "PrefixAffinity",
    "Random",
    "ReplaceDead",
    "RoundRobin",
    "Router",
    "Seconds",
    "Sglang",
    "Speculation",
    "Staged",
    "StrictFifo",
    "TrainScheduler",
    "VllmDp",
    "WeightSync",
    "WindowedFifo",
]
