"""Held-out evaluation through the same gateway, agents and engines as training, decoding greedily.

`evaluation.json`: {"start": {"scores": {task: reward}}, "end": {...}, "domains": {task: domain}, "decoding": "greedy"}.
The tasks are frozen: the same (seed, index) in every run, whatever the scenario's seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from forge.domains.base import Task
from forge.live.backend import LiveBackend, OpenTrajectory
from forge.live.child import Child
from forge.mix import Mix
from forge.rollout.engine import Sampling
from forge.scenario import Scenario
from forge.sections import ToolWait
from forge.types import ForgeError, Outcome

#: The held-out set is the same for every seed of a scenario, so that runs can be compared task by task.
HELD_OUT_SEED = 20260
AT_ONCE = 64  # of Forge's own loop
TIMEOUT_S = 120.0
PREFIX = "eval-"
#: Share of tasks that may die (a timeout on a busy machine) before an evaluation is refused.
MOST_DEAD = 0.05


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Score per task, and how many of them died (they score 0)."""

    scores: dict[str, float]
    died: int

    @property
    def mean(self) -> float:
        return sum(self.scores.values()) / len(self.scores)


@dataclass
class Evaluator:
    """Plays a fixed list of tasks, `at_once` of them. `take_outcome` gets every outcome whose id starts with PREFIX."""

    backend: LiveBackend
    sampling: Callable[[Task, str, float], Sampling]
    at_once: int = AT_ONCE
    agents: Child = field(init=False)
    _waiting: dict[str, asyncio.Future[Outcome]] = field(default_factory=dict)

    def take_outcome(self, outcome: Outcome) -> None:
        self.backend.close(outcome.trajectory)
        future = self._waiting.pop(outcome.trajectory, None)
        if future is not None:
            future.set_result(outcome)

    async def run(self, tasks: list[Task], label: str) -> Evaluation:
        """Play every task. Raises ForgeError where more than one in twenty died."""
        gate = asyncio.Semaphore(self.at_once)

        async def play(index: int, task: Task) -> Outcome:
            async with gate:
                trajectory = f"{PREFIX}{label}-{index}.0"
                opened = OpenTrajectory(
                    id=trajectory, sampling=self.sampling(task, trajectory, 0.0), position=None, member=0
                )
                self.backend.admit(opened)
                future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
                self._waiting[trajectory] = future
                self.agents.send("play", trajectory, task, ToolWait(median_s=0.0), TIMEOUT_S)
                return await future

        outcomes = await asyncio.gather(*(play(i, task) for i, task in enumerate(tasks)))
        dead = [o for o in outcomes if o.reward is None]
        if len(dead) > MOST_DEAD * len(tasks):
            raise ForgeError(
                f"evaluation ({label}): {len(dead)} of {len(tasks)} held-out tasks died, the first of "
                f"{dead[0].reason}: {dead[0].detail}; scores would say nothing of the model"
            )
        return Evaluation({key(t): o.reward or 0.0 for t, o in zip(tasks, outcomes, strict=True)}, len(dead))


def key(task: Task) -> str:
    """Names the problem: two draws of the same one are one task."""
    return f"{task.domain}/{task.data['problem']}"


def held_out(scenario: Scenario, task_of: Callable[[str, int], Task]) -> list[Task]:
    """`eval.tasks` distinct held-out tasks, spread over the domains as the mix is. `task_of(domain, index)`."""
    mix = Mix(scenario.mix())
    tasks: dict[str, Task] = {}
    drawn = {d.name: 0 for d in scenario.domains}
    slot = 0
    while len(tasks) < scenario.eval.tasks:
        name = mix.domain(slot)
        task = task_of(name, drawn[name])
        drawn[name] += 1
        if drawn[name] > 100 * scenario.eval.tasks:
            raise ForgeError(f"eval.tasks = {scenario.eval.tasks}: domain {name!r} has not that many held-out problems")
        slot += key(task) not in tasks  # a problem drawn twice does not count, and its domain goes again
        tasks[key(task)] = task
    return list(tasks.values())
