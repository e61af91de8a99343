"""Synthetic agents: groups of sessions with tools, sub-agents, rewritten contexts and failures.

A pure function of (seed, index), like `sim.workload`: all policies meet the same work (common random numbers). A larger
group leaves the smaller one's members as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

import numpy as np

from forge.mix import Mix
from forge.sections_agents import AgentDomain
from forge.types import DeathReason, ForgeError
from sim.conversation import Conversation, first_prompt
from sim.draws import Domain, Draws
from sim.laws import normal_cdf
from sim.sessions import Step
from sim.work import Group, MemberWork

_ITEM = 1 << 24  # chains of an item are numbered from multiples of it; those below are the domains' system prompts


class Agents:
    """The work behind every index. `group`: members of an item; `block`: tokens of a KV block. Raises ForgeError.

    `max_context`: the engine's, above every first prompt; None: no agent reaches it. As at the gateway, answers are cut
    to the room left, and a prompt that leaves none is refused: the member dies of it; of a sub-agent's, its parent goes
    on. `hardness` of an item is a standard normal that its members share.
    """

    def __init__(
        self,
        domains: Mapping[str, AgentDomain],
        *,
        seed: int,
        group: int = 8,
        block: int = 16,
        max_context: int | None = None,
    ) -> None:
        for name, value in (("domains", len(domains)), ("group", group), ("block", block)):
            if value < 1:
                raise ForgeError(f"{name}: {value} of them; at least 1 is needed")
        self.block = block
        self._seed = seed
        self._group = group
        self._max_context = max_context
        self._mix = Mix({name: model.share for name, model in domains.items()})
        self._domains = {name: Domain(model, 2 * i) for i, (name, model) in enumerate(domains.items())}

    def item(self, index: int, domain: str | None = None) -> Group:
        """Two standard normals of the item, then one row per member, drawn in order."""
        name = domain or self._mix.domain(index)
        drawn = self._domains[name]
        rng = self._rng(index)
        hardness, task_z = rng.standard_normal(2).tolist()
        draws = drawn.members(hardness, rng.standard_normal((self._group, drawn.width)))
        ids = count(_ITEM * (index + 1))
        prompt, shared = first_prompt(drawn.system, (next(ids), drawn.task_tokens(task_z)), self.block)
        members = []
        for number, own in enumerate(draws):
            talk = Conversation(drawn.model.context, self.block, prompt, shared, ids, self._max_context)
            members.append(self._member(drawn, (index, number), own, talk, ids))
        difficulty = drawn.model.difficulty_mean + drawn.model.difficulty_sd * hardness
        return Group(name, round(difficulty, 3), tuple(members))

    def _member(
        self, domain: Domain, key: tuple[int, int], own: Draws, talk: Conversation, ids: Iterator[int]
    ) -> MemberWork:
        steps: list[Step] = []
        after: tuple[int, ...] = ()
        timeouts, delay = 0, 0.0
        last = len(own.outputs) - 1
        calls = zip(own.outputs, own.results, own.waits, own.events, strict=True)
        for i, (output, result, wait, event) in enumerate(calls):
            if talk.refused:
                return MemberWork(tuple(steps), own.reward, DeathReason.ENVIRONMENT, timeouts, delay)
            spawns = i < last and event > domain.spawns
            failed = i < last and not spawns and (event < domain.hangs or wait >= domain.timeout_s)
            killed = failed and domain.kills(event)
            steps.append(_step(talk, output, result, after, delay, ends=i == last or killed))
            timeouts += failed
            if killed:
                return MemberWork(tuple(steps), own.reward, DeathReason.ENVIRONMENT, timeouts, domain.timeout_s)
            after, delay = (len(steps) - 1,), domain.timeout_s if failed else wait
            if spawns:
                after, delay = self._spawn(domain, (*key, i), steps, ids), 0.0
        return MemberWork(tuple(steps), own.reward, DeathReason.AGENT_CRASH if own.crashes else None, timeouts, 0.0)

    def _spawn(self, domain: Domain, key: tuple[int, ...], steps: list[Step], ids: Iterator[int]) -> tuple[int, ...]:
        """Add the sub-agents of the call made last, and return their last steps.

        They draw from a generator of their own: whether others spawn some changes nothing here. Their tools end at
        the time-out too, and they neither crash nor spawn.
        """
        rng = self._rng(*key)
        parent, subs = len(steps) - 1, domain.model.sub_agents
        agents = 1 + min(int(normal_cdf(float(rng.standard_normal())) * subs.most), subs.most - 1)
        ends: list[int] = []
        for own in domain.sub_agents(rng.standard_normal((agents, domain.sub_width))):
            prompt, shared = first_prompt(domain.sub_system, (next(ids), subs.task_tokens), self.block)
            talk = Conversation(domain.model.context, self.block, prompt, shared, ids, self._max_context)
            after, delay, last = parent, 0.0, len(own.outputs) - 1
            for i, (output, result, wait) in enumerate(zip(own.outputs, own.results, own.waits, strict=True)):
                if talk.refused:
                    break
                steps.append(_step(talk, output, result, (after,), delay, ends=i == last))
                after, delay = len(steps) - 1, min(wait, domain.timeout_s)
            ends.append(after)
        return tuple(ends)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=key)))


def _step(talk: Conversation, output: int, result: int, after: tuple[int, ...], delay_s: float, *, ends: bool) -> Step:
    """The conversation's next call; nothing comes after it where it `ends`, or the next prompt is refused."""
    prompt = talk.prompt
    output, path, continues = talk.call(output, result)
    keep = continues and not (ends or talk.refused)
    return Step(prompt=prompt, output=output, path=path, keep=keep, after=after, delay_s=delay_s)
