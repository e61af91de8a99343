"""A live run from its first event to its last: evaluate, train until the stop, evaluate, end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rich.console import Console

from forge import trace as ev
from forge.domains.base import Task
from forge.domains.registry import get_domain
from forge.gateway.server import loop_factory
from forge.live.assembly import Assembly, assemble
from forge.live.evaluation import HELD_OUT_SEED, Evaluation, held_out, key
from forge.live.progress import Progress
from forge.live.world import LiveWorld
from forge.runs import RunFolder, write_json
from forge.scenario import Scenario
from forge.train import checkpoint
from forge.types import ForgeError

TICK_S = 0.25
HUSH_S = 2.0
T = TypeVar("T")


def run_live(scenario: Scenario, folder: RunFolder, console: Console, *, resume: bool) -> str:
    """Run to the scenario's stop, or Ctrl-C. Returns "done" or "stopped". Raises ForgeError; the folder resumes."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(scenario, folder, console, resume))


async def _run(scenario: Scenario, folder: RunFolder, console: Console, resume: bool) -> str:
    async with assemble(scenario, folder, console, resume=resume) as live:
        watch(live.world)
        start = None if live.resumes else await evaluate(live, "start")
        if live.world.stopped.is_set():
            raise folder.not_begun()
        begin(live, start)
        reason = await drive(live)
        await hush(live.world)
        live.clock.stop()
        live.world.account_usage()
        end = await evaluate(live, "end") if reason == "done" else None
        if live.world.stopped.is_set():
            reason = "stopped"  # in the evaluation at the latest: a resume makes up for it
        account_evaluation(live, "end", end)
        live.world.control.account(ev.RunEnded(t=live.clock(), reason=reason))
        return reason


def watch(world: LiveWorld) -> None:
    """Ctrl-C stops the run; an exception in any callback of the loop ends it, as what it left undone is unknown."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, world.stopped.set)

    def on_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, ForgeError):  # a fault of ours: where it happened must be seen
            loop.default_exception_handler(context)
        if isinstance(error, Exception):
            world.fail(error)

    loop.set_exception_handler(on_exception)


async def unless_failed(world: LiveWorld, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if Ctrl-C came first. Raises what the world failed of meanwhile."""
    stopped = asyncio.ensure_future(world.stopped.wait())
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, stopped, world.failure}, return_when=asyncio.FIRST_COMPLETED)
        if world.failure.done():
            world.failure.result()
        return task.result() if task.done() else None
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


def begin(live: Assembly, start: Evaluation | None) -> None:
    """Start the clock and the first events of this life."""
    world, control = live.world, live.world.control
    live.clock.start()
    world.has_begun = True
    if not live.resumes:
        seed, name = live.scenario.seed, live.scenario.name
        control.account(ev.RunStarted(t=live.clock(), schema=ev.SCHEMA, world="live", scenario=name, seed=seed))
        world.account_usage()  # what the engines did before the run, an evaluation say, is no part of it
        account_evaluation(live, "start", start)
        return
    position = checkpoint.read(live.newest) if live.newest else None
    _, lost = world.pool.split_taken(position)
    control.account(ev.RolledBack(t=live.clock(), positions=tuple(lost)))
    control.resume(world.pool.resume(position, live.clock()))
    world.resume_items([(i.position, i.attempt, Task(**i.task)) for i in world.pool.running_items()])


async def drive(live: Assembly) -> str:
    """Until the world is done or somebody presses Ctrl-C: "done" or "stopped"."""
    world = live.world
    progress = Progress(live.console, live.scenario, world.control, live.watcher, live.clock)
    tasks = [asyncio.ensure_future(progress.run())]
    try:
        return await unless_failed(world, until_done(world)) or "stopped"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hush(world: LiveWorld) -> None:
    """What is still generating is cancelled, and accounted before the run's last event; a resume plays it again."""
    for trajectory in list(world.backend.trajectories):
        world.backend.close(trajectory)
    for _ in range(round(HUSH_S / 0.01)):
        if not world.control.views.instances.in_flight:
            return
        await asyncio.sleep(0.01)


async def until_done(world: LiveWorld) -> str:
    """Time alone can end a run, so it is asked now and then besides after every event."""
    while not world.done:
        world.advance()
        await asyncio.sleep(TICK_S)
    return "done"


async def evaluate(live: Assembly, label: str) -> Evaluation | None:
    """Score the held-out tasks with the weights served now; into `evaluation.json`. None without any, or on Ctrl-C.

    Raises ForgeError where many tasks died: their zeros would be no measure of the model.
    """
    scenario = live.scenario
    if not scenario.eval.tasks:
        return None
    tasks = held_out(scenario, lambda name, index: get_domain(name).task("held_out", HELD_OUT_SEED, index))
    live.console.print(f"evaluating on {len(tasks)} held-out tasks", style="dim", highlight=False)
    result = await unless_failed(live.world, live.evaluator.run(tasks, label))
    if result is None:
        return None
    path = live.folder.path / "evaluation.json"
    known = json.loads(path.read_text()) if path.is_file() else {"decoding": "greedy", "domains": {}}
    known["domains"] = {key(task): task.domain for task in tasks}
    known[label] = {"scores": result.scores, "mean": result.mean, "died": result.died}
    write_json(path, known)
    text = f"held-out reward at the {label}: {result.mean:.3f} ({len(tasks)} tasks, greedy)"
    live.console.print(text, highlight=False)
    return result


def account_evaluation(live: Assembly, label: str, result: Evaluation | None) -> None:
    if result is not None:
        step = live.world.control.views.version
        event = ev.Evaluated(t=live.clock(), step=step, label=label, mean=result.mean, tasks=len(result.scores))
        live.world.control.account(event)
