"""Work as a live run shows it: turns and lengths by domain, fitted by `forge calibrate`.

A pure function of (seed, position, member), so that two policies in the same scenario meet the very same work
(common random numbers), whatever order things happen in.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from forge.mix import Mix
from forge.scenario import Scenario
from forge.sections import ToolWait
from forge.sections_sim import SimDomain
from forge.types import DeathReason
from sim.laws import normal_cdf
from sim.sessions import Step
from sim.synthetic import Agents
from sim.work import Group, MemberWork, Work

_OWN = 4  # draws of a member besides those of its turns: death, turn of death, turns, reward


def work_of(scenario: Scenario) -> Work:
    """Synthetic agents where the scenario describes them, else the turns and lengths that `forge calibrate` fits."""
    if not scenario.sim.agents:
        return Workload(scenario)
    shares = {d.name: scenario.sim.agents[d.name].model_copy(update={"share": d.weight}) for d in scenario.domains}
    group, most = scenario.queue.group, scenario.engine.max_context
    return Agents(shares, seed=scenario.seed, group=group, block=scenario.sim.block, max_context=most)


class Workload:
    """The work behind every position of a scenario, whatever its queue and policies.

    `hardness` of an item is a standard normal that its members share.
    """

    block = 1  # its steps have no paths

    def __init__(self, scenario: Scenario) -> None:
        self._seed = scenario.seed
        self._group = scenario.queue.group
        self._max_context = scenario.engine.max_context
        self._mix = Mix(scenario.mix())
        self._models = {d.name: scenario.sim.domains.get(d.name, SimDomain()) for d in scenario.domains}
        self._waits = {d.name: d.tool_wait for d in scenario.domains}
        self._items: dict[tuple[int, str], Group] = {}
        self._cdfs = {name: _cdf(model.turns) for name, model in self._models.items()}

    def item(self, position: int, domain: str | None = None) -> Group:
        key = position, domain or self._mix.domain(position)
        if key not in self._items:
            self._items[key] = self._draw(*key)
        return self._items[key]

    def _draw(self, position: int, domain: str) -> Group:
        """One row of standard normals per member, drawn in order: a larger group leaves the smaller one's as it was."""
        model = self._models[domain]
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(position,))))
        hardness = float(rng.standard_normal())
        rows = rng.standard_normal((self._group, _OWN + 2 * len(model.turns))).tolist()
        members = tuple(self._member(domain, hardness, row) for row in rows)
        return Group(domain, round(model.difficulty_mean + model.difficulty_sd * hardness, 3), members)

    def _member(self, domain: str, hardness: float, z: list[float]) -> MemberWork:
        model = self._models[domain]
        count_z, reward_z, *lengths = _shared(model, hardness, z[2 : _OWN + len(model.turns)])
        count = _index(self._cdfs[domain], normal_cdf(count_z)) + 1
        dies = normal_cdf(z[0]) < model.death_rate
        if dies:
            count = 1 + int(normal_cdf(z[1]) * count)
        turns = self._turns(model, self._waits[domain], lengths[:count], z[_OWN + len(model.turns) :])
        death = DeathReason.AGENT_CRASH if dies else None
        return MemberWork(turns, float(normal_cdf(-reward_z) < model.reward), death)

    def _turns(self, model: SimDomain, wait: ToolWait, lengths: list[float], waits: list[float]) -> tuple[Step, ...]:
        steps: list[Step] = []
        delay_s = 0.0
        prompt = min(model.prompt_tokens, self._max_context - 1)
        for i, z in enumerate(lengths):
            room = self._max_context - prompt
            if room < 1:
                break  # the context is full: the agent must answer with what it has
            sampled = max(1, round(model.tokens_median * math.exp(model.tokens_sigma * z)))
            sampled = min(sampled, model.tokens_cap, room)
            after = (i - 1,) if i else ()
            steps.append(Step(prompt=prompt, output=sampled, after=after, delay_s=delay_s))
            delay_s = tool_wait(wait, waits[i])
            prompt += sampled + model.turn_tokens
        return tuple(steps)


def _shared(model: SimDomain, hardness: float, own: list[float]) -> list[float]:
    """Standard normals that have `item_share` of their variance in common with the item's other members."""
    common, rest = math.sqrt(model.item_share) * hardness, math.sqrt(1.0 - model.item_share)
    return [common + rest * z for z in own]


def tool_wait(wait: ToolWait, z: float) -> float:
    """Seconds of the wait whose standard normal is `z`: log-normal body, capped tail."""
    return min(wait.cap_s, wait.median_s * math.exp(wait.sigma * z))


def _cdf(weights: tuple[float, ...]) -> list[float]:
    total = sum(weights)
    return [c / total for c in accumulate(weights)]


def _index(cdf: list[float], u: float) -> int:
    return next((i for i, c in enumerate(cdf) if u < c), len(cdf) - 1)
