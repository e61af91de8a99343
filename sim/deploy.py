"""From a scenario to the instances it runs on."""

from __future__ import annotations

import math

import numpy as np

from forge.cost import CostModel, Deployment, Precision, hardware, model_card
from forge.scenario import Scenario
from forge.sections_sim import Deployed
from forge.types import ForgeError
from sim.engine import Instance, Shape
from sim.iteration import LineTimes, RooflineTimes, SlowTimes, Times

_SLOW = 1 << 22  # spawn key of the slow nodes


def instances(scenario: Scenario) -> list[Instance]:
    """One for each of `engine.instances`, alike but for slow nodes. Raises ForgeError where the model does not fit."""
    times, shape = _times(scenario), _shape(scenario)
    listen, slow = scenario.sim.signals is not None, slow_nodes(scenario)
    slowed = SlowTimes(times, scenario.sim.slow_factor)
    return [Instance(slowed if i in slow else times, shape, listen=listen) for i in range(scenario.engine.instances)]


def slow_nodes(scenario: Scenario) -> frozenset[int]:
    """Slow for the whole run: the same for every policy, and a larger share's include a smaller one's."""
    count = scenario.engine.instances
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(scenario.seed, spawn_key=(_SLOW,))))
    return frozenset(rng.permutation(count)[: math.ceil(scenario.sim.slow_nodes * count)].tolist())


def deployment(of: Deployed) -> Deployment:
    precision = Precision(dense=of.dense, experts=of.experts, kv=of.kv)
    return Deployment(
        model=model_card(of.model), hardware=hardware(of.hardware), precision=precision, tp=of.tp, ep=of.ep, dp=of.dp
    )


def _times(scenario: Scenario) -> Times:
    sim = scenario.sim
    if sim.deployment is None:
        return LineTimes(step_s=sim.step_s, row_s=sim.row_s, prefill_token_s=sim.prefill_token_s)
    return RooflineTimes(CostModel(deployment(sim.deployment)))


def _shape(scenario: Scenario) -> Shape:
    sim, engine = scenario.sim, scenario.engine
    of = sim.deployment
    if of is None:  # the embedded engine: a row of `max_context` tokens for every slot, prompts in one piece
        tokens = engine.slots * engine.max_context
        return Shape(block=sim.block, capacity=-(-tokens // sim.block), budget=2 * tokens, seats=engine.slots)
    on = deployment(of)
    tokens = of.kv_tokens if of.kv_tokens is not None else int(on.kv_tokens) * on.dp
    if tokens < engine.max_context:
        raise ForgeError(
            f"sim.deployment: {on.model.name} on {on.devices} {on.hardware.name} leaves room for {max(0, tokens)} "
            f"tokens of KV, less than engine.max_context = {engine.max_context}; use more devices or a narrower format"
        )
    return Shape(block=sim.block, capacity=tokens // sim.block, budget=of.budget, seats=engine.slots)
