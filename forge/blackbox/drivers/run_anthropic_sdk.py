"""The stock Anthropic SDK in a loop of its own."""

import sys

import work
from anthropic import Anthropic

client = Anthropic(timeout=work.TIMEOUT_S)
tools = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in work.SCHEMAS
]
messages = [{"role": "user", "content": work.PROMPT}]
settings = {"model": work.MODEL, "max_tokens": 4096, "tools": tools, **({"system": work.SYSTEM} if work.SYSTEM else {})}


def ask():
    if not work.STREAM:
        return client.messages.create(messages=messages, **settings)
    with client.messages.stream(messages=messages, **settings) as stream:
        return stream.get_final_message()


for _ in range(work.TURNS):
    reply = ask()
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        work.answer("".join(block.text for block in reply.content if block.type == "text"))
        sys.exit(0)
    messages.append({"role": "assistant", "content": reply.content})
    results = [
        {"type": "tool_result", "tool_use_id": one.id, "content": work.use(one.name, one.input)} for one in calls
    ]
    messages.append({"role": "user", "content": results})
sys.exit(work.GAVE_UP)
