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
from forge.gateway.access import access_tokens
from forge.gateway.app import create_app
from forge.gateway.budget import Budget
from forge.gateway.chat import HfChatCodec, template_warning
from forge.gateway.constrain import constrainer
from forge.gateway.request_log import RequestLog
from forge.gateway.server import calm_collector, serve
from forge.live import agent_worker, trainer_worker
from forge.live.backend import LiveBackend
from forge.live.child import Child, Message, failure_of
from forge.live.evaluation import AT_ONCE, PREFIX, Evaluator
from forge.live.fleet import Fleet
from forge.live.progress import Watcher
from forge.live.world import LiveWorld
from forge.models import resolve
from forge.pool.store import Pool
from forge.runs import RunFolder
from forge.scenario import Scenario
from forge.train import checkpoint
from forge.types import ForgeError, Outcome

REQUEST_LOG = "requests.jsonl"


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
    if warning := template_warning(scenario.model.path, codec):
        console.print(warning, highlight=False, soft_wrap=True)
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

        def ended(outcome: Outcome) -> None:
            taker = evaluator if outcome.trajectory.startswith(PREFIX) else world
            taker.take_outcome(outcome)

        world.backend = LiveBackend(
            model=scenario.model.path,
            fleet=world.fleet,
            control=control,
            clock=clock,
            budget=Budget(calls=scenario.live.trajectory_calls, tokens=scenario.live.trajectory_tokens),
            ended=ended,
        )
        has_programs = any(domain.agent for domain in scenario.domains)
        at_once = scenario.live.programs if has_programs else AT_ONCE
        evaluator = Evaluator(world.backend, world.sampling, at_once)
        live = scenario.live
        tokens = access_tokens(live.host, live.tokens, "live.host", "live.tokens")
        log = stack.enter_context(RequestLog(folder.path / REQUEST_LOG)) if live.request_log else None
        constrain = None if scenario.engine.kind == "fake" else constrainer(codec, model)
        app = create_app(world.backend, codec, pin_sampling=True, constrain=constrain, tokens=tokens, log=log)
        world.backend.gateway = app.state.gateway
        server = await serve(app, host=live.host, port=live.port)
        stack.push_async_callback(server.stop)
        await start_children(stack, world, ended, (scenario, model, newest, checkpoints))
        evaluator.agents = world.agents
        world.agents.send("base", server.url, scenario.model.path, tokens[0] if tokens else "forge")
        calm_collector()
        yield Assembly(scenario, folder, world, evaluator, clock, watcher, console, newest, resumes)


async def start_children(
    stack: contextlib.AsyncExitStack, world: LiveWorld, ended: Callable[[Outcome], None], trainer: tuple[Any, ...]
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

    names = [d.name for d in world.scenario.domains]
    world.agents = start("agents", lambda message: ended(message[1]), agent_worker.main, world.scenario)
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
