"""Everything a live run is made of, brought up and taken down again: pool, trace, gateway, child processes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from forge import trace as ev
from forge.control import Control
from forge.domains.registry import warm_up
from forge.gateway.app import create_app
from forge.gateway.chat import HfChatCodec
from forge.gateway.server import serve
from forge.live import agent_worker, trainer_worker
from forge.live.backend import LiveBackend
from forge.live.child import Child, Message, failure_of
from forge.live.evaluation import PREFIX, Evaluator
from forge.live.fleet import Fleet
from forge.live.progress import Watcher
from forge.live.world import LiveWorld
from forge.models import resolve
from forge.pool.store import Pool
from forge.runs import RunFolder
from forge.scenario import Scenario
from forge.train import checkpoint
from forge.types import ForgeError


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
    """Everything of a live run that is up and ready. `resumes`: this life goes on from an earlier one.

    `newest` is the checkpoint this life starts from, looked for once: the trainer, the engines and the pool agree.
    """

    scenario: Scenario
    folder: RunFolder
    world: LiveWorld
    evaluator: Evaluator
    clock: Clock
    watcher: Watcher
    console: Console
    newest: Path | None
    resumes: bool


@asynccontextmanager
async def assemble(scenario: Scenario, folder: RunFolder, console: Console, *, resume: bool) -> AsyncIterator[Assembly]:
    """Start every part; whatever happens, end every child process and close the pool."""
    model = resolve(scenario.model.path)
    codec = HfChatCodec(model, scenario.model.tool_prompt)
    checkpoints = folder.path / "checkpoints"
    async with contextlib.AsyncExitStack() as stack:
        pool = stack.enter_context(Pool(folder.path / "pool.sqlite"))  # its lock keeps a second process out
        if resume:
            folder.begin_life()
        resumes = resume and has_begun(folder.trace)
        newest = checkpoint.latest(checkpoints) if resumes else None
        clock = Clock(last_time(folder.trace) if resumes else 0.0)
        writer = ev.TraceWriter(folder.trace)
        stack.callback(writer.close)
        watcher = Watcher()
        control = Control(
            policies=scenario.policy.fresh(),
            shape=scenario.shape(),
            instances=scenario.engine.instances,
            group=scenario.queue.group,
            seed=scenario.seed,
            mix=scenario.mix(),
            concurrency=scenario.queue.concurrency,
            sinks=(pool, writer, watcher),
        )
        world = LiveWorld(scenario=scenario, control=control, pool=pool, clock=clock, stop_ids=codec.stop_ids)
        weights, version = (newest, checkpoint.read(newest).version) if newest else (model, 0)
        world.fleet = Fleet(scenario, weights, version, world, folder.path)
        stack.callback(world.fleet.stop)
        world.backend = LiveBackend(model=scenario.model.path, fleet=world.fleet, control=control, clock=clock)
        app = create_app(world.backend, codec, pin_sampling=True)
        world.backend.gateway = app.state.gateway
        server = await serve(app, host=scenario.live.host, port=scenario.live.port)
        stack.push_async_callback(server.stop)
        evaluator = Evaluator(world.backend, world.sampling)
        await start_children(stack, world, evaluator, (scenario, model, newest, checkpoints))
        world.agents.send("base", server.url, scenario.model.path)
        yield Assembly(scenario, folder, world, evaluator, clock, watcher, console, newest, resumes)


async def start_children(
    stack: contextlib.AsyncExitStack, world: LiveWorld, evaluator: Evaluator, trainer: tuple[Any, ...]
) -> None:
    """Agents, trainer and engines, all at once; returns when each has said that it is ready."""
    waiting: list[asyncio.Future[None]] = []

    def start(name: str, handler: Callable[[Message], None], target: Callable[..., None], *args: Any) -> Child:
        ready = asyncio.get_running_loop().create_future()
        waiting.append(ready)

        def fail(error: Exception) -> None:
            world.fail(error) if ready.done() else ready.set_exception(error)

        def on_message(message: Message) -> None:
            match message:
                case ("ready", *_):
                    ready.set_result(None)
                case ("failed", *_):
                    fail(failure_of(message))
                case _:
                    handler(message)

        def on_exit() -> None:
            fail(ForgeError(f"the {name} process ended unexpectedly; `forge run --resume` goes on from here"))

        child = Child(name, target, *args)
        child.watch(on_message, on_exit)
        stack.callback(child.stop)
        return child

    def on_agents(message: Message) -> None:
        _, outcome = message
        if outcome.trajectory.startswith(PREFIX):
            evaluator.take_outcome(outcome)
        else:
            world.take_outcome(outcome)

    names = [d.name for d in world.scenario.domains]
    world.agents = start("agents", on_agents, agent_worker.main, world.scenario.seed, names)
    evaluator.agents = world.agents
    world.trainer = start("trainer", lambda message: world.take_step(message[1]), trainer_worker.main, *trainer)
    warm_up(names)  # this process draws the tasks
    await world.fleet.start()
    await asyncio.gather(*waiting)


def has_begun(trace: Path) -> bool:
    """A life that was killed before its first event left nothing to go on from. Drops a line torn by a kill."""
    if not trace.is_file():
        return False
    ev.cut_torn_tail(trace)
    return trace.stat().st_size > 0


def last_time(trace: Path) -> float:
    """Where the run's clock stood when the last life ended."""
    return max(event.t for event in ev.read(trace))
