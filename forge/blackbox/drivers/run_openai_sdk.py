"""The stock OpenAI SDK in a loop of its own."""

import json
import sys

import work
from openai import OpenAI

client = OpenAI(timeout=work.TIMEOUT_S)
tools = [{"type": "function", "function": schema} for schema in work.SCHEMAS]
messages = [{"role": "system", "content": work.SYSTEM}] if work.SYSTEM else []
messages.append({"role": "user", "content": work.PROMPT})


def ask():
    request = {"model": work.MODEL, "messages": messages, **({"tools": tools} if tools else {})}
    if not work.STREAM:
        return client.chat.completions.create(**request).choices[0].message
    with client.chat.completions.stream(**request) as stream:
        return stream.get_final_completion().choices[0].message


for _ in range(work.TURNS):
    message = ask()
    if not message.tool_calls:
        work.answer(message.content or "")
        sys.exit(0)
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.function.name, "arguments": one.function.arguments}}
        for one in message.tool_calls
    ]
    messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
    for one in message.tool_calls:
        result = work.use(one.function.name, json.loads(one.function.arguments))
        messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
sys.exit(work.GAVE_UP)
