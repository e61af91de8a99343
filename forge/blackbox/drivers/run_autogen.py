"""autogen-agentchat: its assistant agent with the task's tools."""

import asyncio

import work
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

KNOWN = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def main():
    client = OpenAIChatCompletionClient(
        model=work.MODEL, base_url=work.URL, api_key=work.KEY, model_info=KNOWN, timeout=work.TIMEOUT_S
    )
    agent = AssistantAgent(
        "agent",
        model_client=client,
        tools=work.functions(),
        system_message=work.SYSTEM or None,
        max_tool_iterations=work.TURNS,
        model_client_stream=work.STREAM,
    )
    done = await agent.run(task=work.PROMPT)
    work.answer(done.messages[-1].to_text())


asyncio.run(main())
