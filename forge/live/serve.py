"""`forge serve`: one engine behind the gateway, for agents to try a model, and to be recorded."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from forge.gateway.access import access_tokens
from forge.gateway.app import create_app
from forge.gateway.budget import Budget
from forge.gateway.chat import HfChatCodec, template_warning
from forge.gateway.constrain import constrainer
from forge.gateway.local import EngineBackend
from forge.gateway.request_log import RequestLog
from forge.gateway.server import calm_collector, loop_factory, serve
from forge.live.engine_worker import make_engine
from forge.live.recording import PoolRecording
from forge.models import check_context, resolve
from forge.policies.dispatch import Mixed
from forge.rollout.engine import Sampling
from forge.scenario import parse
from forge.types import ItemState


@dataclass(frozen=True, kw_only=True)
class Service:
    """What `forge serve` was asked for. 0 in a limit: there is none."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    slots: int = 16
    max_context: int = 512
    tool_prompt: str = "template"
    record: Path | None = None
    idle_s: float = 600.0
    calls: int = 0
    tokens: int = 0
    refuse_above: int = 0
    access: Path | None = None
    log: Path | None = None


def serve_model(service: Service, console: Console) -> None:
    """Serve until Ctrl-C. Raises ForgeError for an unknown model or a port in use."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(service, console))


async def _serve(service: Service, console: Console) -> None:
    tokens = access_tokens(service.host, service.access, "--host", "--tokens")
    folder = resolve(service.model)
    codec = _codec(service, folder)
    if not codec.shows_tools:
        told = "its chat template ignores `tools`; agents that need them: --tool-prompt hermes"
        console.print(f"{service.model}: {told}", highlight=False, soft_wrap=True)
    if warning := template_warning(service.model, codec):
        console.print(warning, highlight=False, soft_wrap=True)
    async with contextlib.AsyncExitStack() as stack:
        recording = stack.enter_context(PoolRecording(service.record)) if service.record else None
        log = stack.enter_context(RequestLog(service.log)) if service.log else None
        backend = _backend(service, folder, recording)
        stack.callback(backend.close)
        constrain = constrainer(codec, folder)
        app = create_app(
            backend, codec, pin_sampling=recording is not None, constrain=constrain, tokens=tokens, log=log
        )
        backend.sessions.attach(app.state.gateway)
        stack.callback(backend.sessions.close_all, "the gateway was stopped")
        server = await serve(app, host=service.host, port=service.port)
        stack.push_async_callback(server.stop)
        calm_collector()
        console.print(f"serving {service.model}; base URLs, each with a trajectory of its own for every NAME:")
        console.print(f"  OpenAI (chat, responses, completions)   {server.url}/t/NAME/v1")
        console.print(f"  Anthropic messages, Gemini              {server.url}/t/NAME")
        if recording is not None:
            console.print(f"  reports: POST                           {server.url}/t/NAME/report", soft_wrap=True)
            console.print(f"recording in {service.record}: {_told(recording)}", highlight=False, soft_wrap=True)
        console.print("Ctrl-C stops", style="dim")
        await _until_stopped(backend, service.idle_s)


async def _until_stopped(backend: EngineBackend, idle_s: float) -> None:
    """Until Ctrl-C or SIGTERM; closes idle trajectories meanwhile."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), min(10.0, idle_s / 4))
        backend.sessions.close_idle()


def _codec(service: Service, folder: Path) -> HfChatCodec:
    check_context(folder, service.max_context, "--max-context")
    return HfChatCodec(folder, service.tool_prompt)


def _backend(service: Service, folder: Path, recording: PoolRecording | None) -> EngineBackend:
    scenario = parse(
        {
            "name": "serve",
            "stop": {"items": 1},
            "domains": [{"name": "any"}],
            "engine": {"slots": service.slots, "max_context": service.max_context},
        },
        "forge serve",
    )
    return EngineBackend(
        make_engine(scenario, folder),
        model=service.model,
        defaults=Sampling(max_tokens=service.max_context),
        budget=Budget(calls=service.calls, tokens=service.tokens),
        idle_s=service.idle_s,
        recording=recording,
        dispatch=Mixed(refuse_above=service.refuse_above),
        start_s=recording.resumed_s if recording else 0.0,
    )


def _told(recording: PoolRecording) -> str:
    counts = recording.counts
    return f"{counts[ItemState.FINISHED]} trajectories with a reward, {counts[ItemState.DEAD]} dead"
