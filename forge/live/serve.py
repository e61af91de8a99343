"""`forge serve`: one engine behind the gateway, for agents to try a model."""

from __future__ import annotations

import asyncio
from typing import get_args

from rich.console import Console

from forge.gateway.app import create_app
from forge.gateway.chat import HfChatCodec, ToolPrompt
from forge.gateway.local import EngineBackend
from forge.gateway.server import loop_factory, serve
from forge.live.engine_worker import make_engine
from forge.models import check_context, resolve
from forge.scenario import parse
from forge.types import ForgeError


def serve_model(model: str, *, port: int, slots: int, max_context: int, tool_prompt: str, console: Console) -> None:
    """Serve until Ctrl-C. Raises ForgeError for an unknown model or a port in use."""
    prompt: ToolPrompt | None = next((p for p in get_args(ToolPrompt) if p == tool_prompt), None)
    if prompt is None:
        raise ForgeError(f"--tool-prompt {tool_prompt}: must be one of {', '.join(get_args(ToolPrompt))}")
    folder = resolve(model)
    check_context(folder, max_context, "--max-context")
    codec = HfChatCodec(folder, prompt)
    if not codec.shows_tools:
        console.print(f"{model}: its chat template ignores `tools`; agents that need them: --tool-prompt hermes")
    scenario = parse(
        {
            "name": "serve",
            "stop": {"items": 1},
            "domains": [{"name": "any"}],
            "engine": {"slots": slots, "max_context": max_context},
        },
        "forge serve",
    )
    backend = EngineBackend(make_engine(scenario, folder), model=model)

    async def until_stopped() -> None:
        server = await serve(create_app(backend, codec), port=port)
        console.print(f"serving {model}; base URLs, each with a trajectory of its own for every NAME:")
        console.print(f"  OpenAI (chat, responses, completions)   {server.url}/t/NAME/v1")
        console.print(f"  Anthropic messages, Gemini              {server.url}/t/NAME")
        console.print("Ctrl-C stops", style="dim")
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()
            backend.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(until_stopped())
