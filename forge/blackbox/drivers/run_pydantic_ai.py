"""pydantic-ai: an agent with the task's tools. FORGE_API: chat (default) or responses."""

import asyncio
import os
import sys

import work
from openai import AsyncOpenAI
from pydantic_ai import Agent, Tool, UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


def tool(schema):
    name = schema["name"]
    return Tool.from_schema(
        lambda **arguments: work.use(name, arguments),
        name=name,
        description=schema["description"],
        json_schema=schema["parameters"],
    )


async def main():
    kind = OpenAIResponsesModel if os.environ.get("FORGE_API") == "responses" else OpenAIChatModel
    provider = OpenAIProvider(openai_client=AsyncOpenAI(timeout=work.TIMEOUT_S))
    agent = Agent(
        kind(work.MODEL, provider=provider),
        system_prompt=(work.SYSTEM,) if work.SYSTEM else (),
        tools=[tool(schema) for schema in work.SCHEMAS],
    )
    limits = UsageLimits(request_limit=work.TURNS)
    if work.STREAM:
        async with agent.run_stream(work.PROMPT, usage_limits=limits) as run:
            work.answer(await run.get_output())
    else:
        work.answer((await agent.run(work.PROMPT, usage_limits=limits)).output)


try:
    asyncio.run(main())
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(work.GAVE_UP)
