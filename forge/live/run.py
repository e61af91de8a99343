"""Putting a live run together: folder, pool, children, gateway, evaluation; and taking it apart again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from forge import trace as ev
from forge.control import Control
from forge.domains.base import Task
from forge.domains.registry import get_domain, warm_up
from forge.gateway.app import create_app
from forge.gateway.chat import HfChatCodec
from forge.gateway.server import RunningServer, loop_factory, serve
from forge.live import agent_worker, trainer_worker
from forge.live.backend import LiveBackend
from forge.live.child import Child, Message
from forge.live.evaluation import HELD_OUT_SEED, PREFIX, Evaluator, held_out
from forge.live.fleet import Fleet
from forge.live.progress import Progress, Watcher
from forge.live.world import LiveWorld
from forge.models import resolve
from forge.pool.store import Pool
from forge.runs import RunFolder, write_json
from forge.scenario import Scenario
from forge.train import checkpoint
from forge.types import ForgeError

TICK_S = 0.25
Scores = dict[str, float]


class Clock:
    """Seconds of the run: real time since the run began, lives of a resumed run added up."""

    def __init__(self, offset: float) -> None:
        self.offset = offset
        self._start: float | None = None

    def start(self) -> None:
        self._start = time.monotonic()

    def stop(self) -> None:
        self.offset, self._start = self(), None

    def __call__(self) -> float:
        return self.offset if self._start is None else self.offset + time.monotonic() - self._start


@dataclass
class Assembly:
    """Everything of a live run that is up and ready."""

    scenario: Scenario
    folder: RunFolder
    world: LiveWorld
    evaluator: Evaluator
    server: RunningServer
    clock: Clock
    watcher: Watcher
    console: Console


def run_live(scenario: Scenario, folder: RunFolder, console: Console, *, resume: bool) -> str:
    """Run to the scenario's stop, or Ctrl-C. Returns "done" or "stopped". Raises ForgeError; the folder resumes."""
    if resume and folder.trace.is_file():
        ev.cut_torn_tail(folder.trace)
    # A life that was killed before its first event left nothing to go on from: the run begins.
    resume = resume and folder.trace.is_file() and folder.trace.stat().st_size > 0
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(scenario, folder, console, resume))


async def _run(scenario: Scenario, folder: RunFolder, console: Console, resume: bool) -> str:
    async with assemble(scenario, folder, console, resume=resume) as live:
        start = None if resume else await evaluate(live, "start")
        begin(live, resume, start)
        reason = await drive(live)
        live.clock.stop()
        live.world.account_usage()
        if reason == "done":
            account_evaluation(live, "end", await evaluate(live, "end"))
        live.world.control.account(ev.RunEnded(t=live.clock(), reason=reason))
        return reason


# --- up and down ------


@asynccontextmanager
async def assemble(scenario: Scenario, folder: RunFolder, console: Console, *, resume: bool) -> AsyncIterator[Assembly]:
    """Start every part; whatever happens, end every child process and close the pool."""
    model = resolve(scenario.model.path)
    codec = HfChatCodec(model, scenario.model.tool_prompt)
    checkpoints = folder.path / "checkpoints"
    newest = checkpoint.latest(checkpoints)
    clock = Clock(last_time(folder.trace) if resume else 0.0)
    watcher = Watcher()
    async with contextlib.AsyncExitStack() as stack:
        pool = stack.enter_context(Pool(folder.path / "pool.sqlite"))
        writer = ev.TraceWriter(folder.trace)
        stack.callback(writer.close)
        control = Control(
            policies=scenario.policy.fresh(),
            shape=scenario.shape(),
            instances=scenario.engine.instances,
            group=scenario.queue.group,
            seed=scenario.seed,
            sinks=(pool, writer, watcher),
        )
        world = LiveWorld(scenario=scenario, control=control, pool=pool, clock=clock, stop_ids=codec.stop_ids)
        weights, version = (newest, checkpoint.read(newest).version) if newest else (model, 0)
        world.fleet = Fleet(scenario, weights, version, world)
        stack.callback(world.fleet.stop)
        world.backend = LiveBackend(model=scenario.model.path, fleet=world.fleet, control=control, clock=clock)
        gateway = create_app(world.backend, codec, pin_sampling=True)
        world.backend.gateway = gateway.state.gateway
        server = await serve(gateway, host=scenario.live.host, port=scenario.live.port)
        stack.push_async_callback(server.stop)
        evaluator = Evaluator(world.backend, world.sampling)
        await start_children(stack, world, evaluator, model, checkpoints)
        world.agents.send("base", server.url, scenario.model.path)
        yield Assembly(scenario, folder, world, evaluator, server, clock, watcher, console)


async def start_children(
    stack: contextlib.AsyncExitStack, world: LiveWorld, evaluator: Evaluator, model: Path, checkpoints: Path
) -> None:
    """Agents, trainer and engines, all at once; returns when each has said that it is ready."""
    waiting: list[asyncio.Future[None]] = []

    def start(name: str, handler: Callable[[Message], None], target: Callable[..., None], *args: Any) -> Child:
        ready = asyncio.get_running_loop().create_future()
        waiting.append(ready)

        def on_message(message: Message) -> None:
            if message[0] == "ready":
                ready.set_result(None)
            elif message[0] == "failed" and not ready.done():
                ready.set_exception(ForgeError(message[1]))
            else:
                handler(message)

        def on_exit() -> None:
            error = ForgeError(f"the {name} process ended unexpectedly; `forge run --resume` goes on from here")
            if ready.done():
                world.fail(error)
            else:
                ready.set_exception(error)

        child = Child(name, target, *args)
        child.watch(on_message, on_exit)
        stack.callback(child.stop)
        return child

    def on_agents(message: Message) -> None:
        if message[0] == "outcome" and message[1].trajectory.startswith(PREFIX):
            evaluator.take_outcome(message[1])
        else:
            world.on_agents(message)

    names = [d.name for d in world.scenario.domains]
    world.agents = start("agents", on_agents, agent_worker.main, world.scenario.seed, names)
    evaluator.agents = world.agents
    trainer = partial(start, "trainer", world.on_trainer, trainer_worker.main)
    world.trainer = trainer(world.scenario, model, checkpoints)
    warm_up(names)  # this process draws the tasks
    await world.fleet.start()
    await asyncio.gather(*waiting)


# --- the run itself ------


def begin(live: Assembly, resume: bool, start: Scores | None) -> None:
    """Start the clock and the first events of this life."""
    world, control = live.world, live.world.control
    live.clock.start()
    if not resume:
        seed, name = live.scenario.seed, live.scenario.name
        control.account(ev.RunStarted(t=live.clock(), schema=ev.SCHEMA, world="live", scenario=name, seed=seed))
        world.account_usage()  # what the engines did before the run, an evaluation say, is no part of it
        account_evaluation(live, "start", start)
        return
    newest = checkpoint.latest(live.folder.path / "checkpoints")
    position = checkpoint.read(newest) if newest else None
    _, lost = world.pool.split_taken(position)
    control.account(ev.RolledBack(t=live.clock(), positions=tuple(lost)))
    control.resume(world.pool.resume(position, live.clock()))
    world.resume_items([(i.position, i.attempt, Task(**i.task)) for i in world.pool.running_items()])


async def drive(live: Assembly) -> str:
    """Until the world is done or somebody presses Ctrl-C."""
    world = live.world
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not world.done.done():
            world.done.set_result("stopped")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    progress = Progress(live.console, live.scenario, world.control, live.watcher, live.clock)
    tasks = [loop.create_task(progress.run()), loop.create_task(tick(world))]
    try:
        reason = await world.done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return reason


async def tick(world: LiveWorld) -> None:
    """Time alone can end a run."""
    while True:
        world.advance()
        await asyncio.sleep(TICK_S)


async def evaluate(live: Assembly, label: str) -> Scores | None:
    """Score the held-out tasks with the weights served now; into `evaluation.json`. None without any."""
    scenario = live.scenario
    if not scenario.eval.tasks:
        return None
    tasks = held_out(scenario, lambda name, index: get_domain(name).task("held_out", HELD_OUT_SEED, index))
    scores = await live.evaluator.run(tasks, label)
    path = live.folder.path / "evaluation.json"
    known = json.loads(path.read_text()) if path.is_file() else {"decoding": "greedy", "domains": {}}
    known["domains"] = {f"{t.domain}/{t.id}": t.domain for t in tasks}
    mean = sum(scores.values()) / len(scores)
    known[label] = {"scores": scores, "mean": mean}
    write_json(path, known)
    live.console.print(f"held-out reward at the {label}: {mean:.3f} ({len(tasks)} tasks, greedy)", highlight=False)
    return scores


def account_evaluation(live: Assembly, label: str, scores: Scores | None) -> None:
    if scores:
        mean, step = sum(scores.values()) / len(scores), live.world.control.views.version
        event = ev.Evaluated(t=live.clock(), step=step, label=label, mean=mean, tasks=len(scores))
        live.world.control.account(event)


def last_time(trace: Path) -> float:
    """Where the run's clock stood when the last life ended."""
    return max(event.t for event in ev.read(trace))
