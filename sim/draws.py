"""What the agents of one item draw, for all of them at once: rows of standard normals to counts and lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forge.sections_agents import AgentDomain
from sim.laws import Array, Law, normal_cdf, threshold

_OWN = 4  # draws of an agent besides those of its calls: calls, reward, crash, place of the crash
_CALL = 4  # draws of a call: output, result, wait, event


@dataclass(frozen=True, slots=True)
class Draws:
    """Of one agent; the tuples have an element a call. `results` and `waits` (s) come after the call, if anything does.

    `events`: standard normals that decide about sub-agents and failures after the call.
    """

    reward: float
    crashes: bool
    outputs: list[int]
    results: list[int]
    waits: list[float]
    events: list[float]


class Domain:
    """A domain's laws, ready to use. Its system prompts, the sub-agents' too, are `chain` and the one after it."""

    def __init__(self, model: AgentDomain, chain: int) -> None:
        self.model = model
        self.system = chain, model.system_tokens
        self.sub_system = chain + 1, model.sub_agents.system_tokens
        self._task = Law(model.task_tokens)
        self._output, self._result, self._wait = map(Law, (model.output_tokens, model.result_tokens, model.tool_wait))
        self._calls, self._sub_calls = Law(model.calls), Law(model.sub_agents.calls)
        self._most, self._sub_most = _most(model.calls.cap), _most(model.sub_agents.calls.cap)
        self.width, self.sub_width = _OWN + _CALL * self._most, _OWN + _CALL * self._sub_most
        self._common, self._rest = math.sqrt(model.item_share), math.sqrt(1.0 - model.item_share)
        self._passes, self._crashes = threshold(model.reward), threshold(model.failures.crash)
        self._set_events(model)

    def _set_events(self, model: AgentDomain) -> None:
        """One normal a call decides. The lowest hang, and of these the lowest kill; the highest spawn; between them,
        where the wait reaches the time-out, the lowest kill."""
        hang, kills, spawn = model.failures.hang, model.failures.kills, model.sub_agents.rate
        self.timeout_s = model.failures.timeout_s
        self.hangs, self.spawns = threshold(hang), -threshold(spawn)
        self._hang_kills = threshold(hang * kills)
        self._wait_kills = threshold(hang + kills * (1.0 - hang - spawn))

    def task_tokens(self, z: float) -> int:
        return int(self._task.whole(np.array([z]))[0])

    def kills(self, event: float) -> bool:
        """Whether the time-out of a call with this event ends its agent."""
        return event < (self._hang_kills if event < self.hangs else self._wait_kills)

    def members(self, hardness: float, rows: Array) -> list[Draws]:
        """`rows`: `width` standard normals a member. Calls, rewards and lengths of output share `item_share` of their
        variance: the harder, the more of each, but less reward."""
        rows[:, :2] = self._common * hardness + self._rest * rows[:, :2]
        outputs = slice(_OWN, _OWN + self._most)
        rows[:, outputs] = self._common * hardness + self._rest * rows[:, outputs]
        return self._draws(self._calls, self._most, self._crashes, rows)

    def sub_agents(self, rows: Array) -> list[Draws]:
        """`rows`: `sub_width` standard normals a sub-agent."""
        return self._draws(self._sub_calls, self._sub_most, -math.inf, rows)

    def _draws(self, calls: Law, most: int, crash_z: float, rows: Array) -> list[Draws]:
        own = rows[:, :_OWN].tolist()
        counts = np.minimum(calls.whole(rows[:, 0]), most).tolist()
        crashes = [z[2] < crash_z for z in own]
        for i, z in enumerate(own):
            if crashes[i]:
                counts[i] = 1 + min(int(normal_cdf(z[3]) * counts[i]), counts[i] - 1)
        width = max(counts)
        output, result, wait, event = (rows[:, low : low + width] for low in range(_OWN, _OWN + _CALL * most, most))
        outputs, results = self._output.whole(output).tolist(), self._result.whole(result).tolist()
        waits, events = self._wait(wait).tolist(), event.tolist()
        return [
            Draws(float(z[1] < self._passes), crashes[i], *(each[i][:n] for each in (outputs, results, waits, events)))
            for i, (z, n) in enumerate(zip(own, counts, strict=True))
        ]


def _most(cap: float) -> int:
    return max(1, round(cap))
