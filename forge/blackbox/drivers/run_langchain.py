"""langchain: `create_agent` (a langgraph graph) with the task's tools. FORGE_API: chat (default) or responses.

FORGE_SUMMARISE_AT: messages from which on its middleware summarises all but the last two.
"""

import os
import sys

import work
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


def tool(schema):
    name = schema["name"]
    return StructuredTool.from_function(
        lambda **arguments: work.use(name, arguments),
        name=name,
        description=schema["description"],
        args_schema=schema["parameters"],
    )


model = ChatOpenAI(
    model=work.MODEL,
    use_responses_api=os.environ.get("FORGE_API") == "responses",
    streaming=work.STREAM,
    timeout=work.TIMEOUT_S,
)
at = int(os.environ.get("FORGE_SUMMARISE_AT", "0"))
summary = [SummarizationMiddleware(model=model, trigger=("messages", at), keep=("messages", 2))] if at else []
agent = create_agent(
    model, [tool(schema) for schema in work.SCHEMAS], system_prompt=work.SYSTEM or None, middleware=summary
)
try:
    asked = {"messages": [{"role": "user", "content": work.PROMPT}]}
    state = agent.invoke(asked, {"recursion_limit": 4 * work.TURNS + 1})
except GraphRecursionError as error:
    print(error)
    sys.exit(work.GAVE_UP)
work.answer(state["messages"][-1].text)
