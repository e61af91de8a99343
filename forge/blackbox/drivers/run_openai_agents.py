"""openai-agents: an agent with the task's tools.

FORGE_API: chat (default) or responses. FORGE_KEEP: besides the task, how many of the newest items (a call, its result)
the model is shown; all by default.
"""

import asyncio
import json
import os
import sys

import work
from agents import (
    Agent,
    FunctionTool,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from agents.run import ModelInputData
from openai import AsyncOpenAI


def tool(schema):
    async def invoke(_context, arguments):
        return await asyncio.to_thread(work.use, schema["name"], json.loads(arguments or "{}"))

    return FunctionTool(
        name=schema["name"],
        description=schema["description"],
        params_json_schema=schema["parameters"],
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )


def newest(data):
    """Its context as the framework has it, cut down before every call of the model."""
    first, *rest = data.model_data.input
    keep = int(os.environ["FORGE_KEEP"])
    return ModelInputData(input=[first, *rest[max(0, len(rest) - keep) :]], instructions=data.model_data.instructions)


async def main():
    set_tracing_disabled(True)
    client = AsyncOpenAI(timeout=work.TIMEOUT_S)
    kind = OpenAIResponsesModel if os.environ.get("FORGE_API") == "responses" else OpenAIChatCompletionsModel
    agent = Agent(
        name="agent",
        instructions=work.SYSTEM or None,
        model=kind(model=work.MODEL, openai_client=client),
        tools=[tool(schema) for schema in work.SCHEMAS],
    )
    config = RunConfig(call_model_input_filter=newest if "FORGE_KEEP" in os.environ else None)
    if work.STREAM:
        run = Runner.run_streamed(agent, work.PROMPT, max_turns=work.TURNS, run_config=config)
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, work.PROMPT, max_turns=work.TURNS, run_config=config)
    work.answer(run.final_output)


try:
    asyncio.run(main())
except (AgentsException, ValueError) as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(work.GAVE_UP)
