"""From a scenario to the instances it runs on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from forge.cost import CostModel, Deployment, Precision, hardware, model_card
from forge.scenario import Scenario
from forge.sections_rollout import Speculation
from forge.sections_sim import Deployed, Sim
from forge.types import ForgeError
from sim.engine import Shape
from sim.iteration import LineTimes, RooflineTimes, SlowTimes, Times
from sim.speculation import Head, SpeculativeTimes

_SLOW = 1 << 22  # spawn key of the slow nodes


#: How long an instance's iterations take, and how large it is.
Plan = tuple[Times, Shape]


def plans(scenario: Scenario) -> list[Plan]:
    """One for each of `engine.instances`, alike but for slow nodes. Raises ForgeError where the model does not fit."""
    times, shape = _times(scenario.sim.deployment, scenario.sim), _shape(scenario, scenario.sim.deployment)
    slow, slowed = slow_nodes(scenario), SlowTimes(times, scenario.sim.slow_factor)
    of_each = [slowed if i in slow else times for i in range(scenario.engine.instances)]
    if scenario.sim.speculation is None:
        return [(one, shape) for one in of_each]
    head = _head(scenario.sim.speculation)
    return [(SpeculativeTimes(one, head, scenario.policy.speculation), shape) for one in of_each]


def prefills(scenario: Scenario) -> list[Plan]:
    """Of the instances that only compute prompts."""
    of = scenario.sim.deployment
    if of is None or of.prefill is None:
        return []
    pool = of.prefill
    of = of.model_copy(update={"tp": pool.tp, "ep": pool.ep, "dp": pool.dp})
    return [(_times(of, scenario.sim), _shape(scenario, of))] * pool.instances


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


def _times(of: Deployed | None, sim: Sim) -> Times:
    if of is None:
        return LineTimes(step_s=sim.step_s, row_s=sim.row_s, prefill_token_s=sim.prefill_token_s)
    on = deployment(of)
    if of.calibration is None:
        return RooflineTimes(CostModel(on))
    return RooflineTimes(CostModel.from_toml(Path(of.calibration), on, of.calibrated))


def _head(of: Speculation) -> Head:
    return Head(
        acceptance=of.by_depth(),
        draft_share=of.draft_share,
        drift=of.drift,
        follows=of.head_follows,
        context=of.context,
    )


def _shape(scenario: Scenario, of: Deployed | None) -> Shape:
    sim, engine = scenario.sim, scenario.engine
    if of is None:  # the embedded engine: a row of `max_context` tokens for every slot, prompts in one piece
        tokens = engine.slots * engine.max_context
        return Shape(block=sim.block, capacity=-(-tokens // sim.block), budget=2 * tokens, seats=engine.slots)
    on = deployment(of)
    tokens = of.kv_tokens if of.kv_tokens is not None else int(on.kv_tokens) * on.dp
    if of.kv_tokens is not None and tokens < engine.max_context:
        raise ForgeError(
            f"sim.deployment.kv_tokens = {tokens}: less than engine.max_context = {engine.max_context}; "
            "raise the one or lower the other"
        )
    if of.budget <= engine.slots:
        raise ForgeError(
            f"sim.deployment.budget = {of.budget}: must exceed engine.slots = {engine.slots}, or no prompt is ever "
            "computed"
        )
    if tokens < engine.max_context:
        raise ForgeError(
            f"sim.deployment: {on.model.name} on {on.devices} {on.hardware.name} leaves room for {max(0, tokens)} "
            f"tokens of KV, less than engine.max_context = {engine.max_context}; use more devices or a narrower format"
        )
    return Shape(block=sim.block, capacity=tokens // sim.block, budget=of.budget, seats=engine.slots)
