"""What a scenario may mean, but is more likely a slip: said before a simulation, one line each."""

from __future__ import annotations

from forge.policies import (
    CacheAware,
    ComesBack,
    Conditional,
    Dynamo,
    Fixed,
    Llmd,
    PrefixAffinity,
    Seconds,
    Sglang,
    VllmDp,
)
from forge.scenario import Scenario

#: routers that choose by what instances report
READERS = (CacheAware, Dynamo, Llmd, PrefixAffinity, Seconds, Sglang, VllmDp)


def slips(scenario: Scenario) -> list[str]:
    return [*_contexts(scenario), *_idle(scenario)]


def _contexts(scenario: Scenario) -> list[str]:
    room = scenario.engine.max_context
    return [
        f"sim.agents.{name}.context.limit_tokens = {limit}: above engine.max_context = {room}, so answers may be cut, "
        f"and members die of refused prompts before they rewrite their context; raise the one or lower the other"
        for name, agent in scenario.sim.agents.items()
        if (limit := agent.context.limit_tokens) > room
    ]


def _idle(scenario: Scenario) -> list[str]:
    """Policies that the simulated world gives nothing to decide on."""
    policy, sim = scenario.policy, scenario.sim
    prefill = None if sim.deployment is None else sim.deployment.prefill
    lacking = []
    if isinstance(policy.speculation, Fixed) and sim.speculation is None:
        lacking.append(("speculation", "there is no sim.speculation, the head that drafts, so nothing is drafted"))
    if not isinstance(policy.placement, Conditional) and prefill is None:
        lacking.append(
            ("placement", "there is no sim.deployment.prefill, so prompts are computed where they are decoded")
        )
    if isinstance(policy.kv, ComesBack) and not sim.agents:
        lacking.append(("kv", "there is no sim.agents, so no prompt says which blocks it shares"))
    if isinstance(policy.router, READERS) and sim.signals is None:
        lacking.append(("router", "there is no sim.signals, so instances report neither load nor what they hold"))
    return [f"policy.{slot}.kind = {getattr(policy, slot).kind!r}: {why}; add it" for slot, why in lacking]
