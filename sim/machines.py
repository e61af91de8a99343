"""From a scenario to all its instances, and what stands before them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forge.cost import Deployment
from forge.scenario import Scenario
from forge.sections_rollout import Prefill, TierSizes
from sim.cluster import Cluster
from sim.deploy import Plan, deployment, plans, prefills
from sim.engine import Instance
from sim.fleet import Fleet, Listener
from sim.front import Front, Inner
from sim.links import Links, wire
from sim.speculation import SpeculativeTimes
from sim.tier_store import Stores
from sim.tiers import Hits, Roads, Tiers
from sim.ways import Role

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machines:
    """`instances`: first those that requests are sent to, `front` of them, then those that compute prompts for them."""

    scenario: Scenario
    instances: list[Instance]
    front: int
    stores: Stores | None
    plans: Sequence[Plan]

    def before(self, env: Any, listener: Listener) -> Front:
        """What stands before them in a run: a `sim.front.Build`."""
        deployed = self.scenario.sim.deployment
        if deployed is None or deployed.prefill is None:
            return self._inner(env, listener)
        on, pool = deployment(deployed), deployed.prefill
        device = pool.bandwidth if pool.bandwidth is not None else on.hardware.network_bandwidth
        behind = replace(on, tp=pool.tp, ep=pool.ep, dp=pool.dp)
        widths = [round(device * one.devices) for one in (on, behind)]
        return Cluster(
            env,
            self._inner,
            listener,
            roles=_roles(self.front, pool),
            front=self.front,
            links=Links(env, [widths[0]] * self.front + [widths[1]] * pool.instances),
            wire=wire(self.scenario.sim.block, token_bytes(on), min(widths), pool.block_s, pool.transfer_s),
            placement=self.scenario.policy.placement,
        )

    def _inner(self, env: Any, listener: Listener) -> Inner:
        sim = self.scenario.sim
        if self.stores is None or sim.tiers is None or sim.deployment is None:
            return Fleet(env, self.instances, listener)
        sizes, token = sim.tiers, token_bytes(deployment(sim.deployment))
        roads = Roads(
            links=Links(env, [round(sizes.l2_bandwidth)] * len(self.instances) + [round(sizes.l3_bandwidth)]),
            l2=wire(sim.block, token, sizes.l2_bandwidth, 0.0, sizes.l2_latency_s),
            l3=wire(sim.block, token, sizes.l3_bandwidth, 0.0, sizes.l3_latency_s),
        )
        times = [times for times, _ in self.plans]
        return Tiers(env, self.instances, listener, stores=self.stores, roads=roads, times=times)


def machines(scenario: Scenario) -> Machines:
    """Raises ForgeError where the model does not fit."""
    planned = [*plans(scenario), *prefills(scenario)]
    sim, listen = scenario.sim, scenario.sim.signals is not None
    stores = None
    if sim.tiers is not None and sim.deployment is not None:
        stores = _stores(sim.tiers, len(planned), sim.block * token_bytes(deployment(sim.deployment)))
    made: list[Instance] = []
    for i, (times, shape) in enumerate(planned):
        spill = None if stores is None else stores.spill(i, lambda i=i: made[i].version)  # type: ignore[misc]
        made.append(Instance(times, shape, listen=listen, spill=spill))
        if isinstance(times, SpeculativeTimes):
            times.follow(made[i])
    return Machines(scenario, made, scenario.engine.instances, stores, planned)


def hits(front: Front) -> Hits | None:
    """Prompt tokens by the tier that they were found in; None where there are no tiers."""
    inner = front.inner if isinstance(front, Cluster) else front
    return inner.hits if isinstance(inner, Tiers) else None


def token_bytes(on: Deployment) -> float:
    """Of a token's KV, all layers and heads once: devices that hold copies make them of what one received."""
    return replace(on, tp=1, ep=1, dp=1).kv_bytes


def _stores(sizes: TierSizes, count: int, block_bytes: float) -> Stores:
    return Stores(count, int(sizes.l2_gib * GIB / block_bytes), int(sizes.l3_gib * GIB / block_bytes))


def _roles(front: int, pool: Prefill) -> list[Role]:
    decode: list[Role] = ["decode"] * front
    prefill: list[Role] = ["prefill"] * pool.instances
    return decode + prefill
