"""What the drivers share: the task, its tools as plain functions, and the final answer. Standard library alone.

Each driver is stock code of its framework: an agent, its tools, a run. It finds `task.json` in its home, and ends with
0 and the answer in /workspace/.answer, or with 3 where the model used up its turns or did what its framework does not
bear.
"""

import inspect
import json
import os
import subprocess
import urllib.request
from pathlib import Path

MODEL = os.environ["FORGE_MODEL"]
URL = os.environ.get("OPENAI_BASE_URL", "")
KEY = os.environ.get("OPENAI_API_KEY", "forge")
STREAM = os.environ.get("FORGE_STREAM") == "1"
TIMEOUT_S = float(os.environ.get("FORGE_TIMEOUT_S", "600"))
GAVE_UP = 3

TASK = json.loads((Path(os.environ["HOME"]) / "task.json").read_text(encoding="utf-8"))
SYSTEM, PROMPT, TURNS = TASK["system"], TASK["prompt"], TASK["max_turns"]


def bash(command: str) -> str:
    """Run a bash command in the current folder and return what it prints.

    Args:
        command: The command.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return (done.stdout + done.stderr)[-8000:] or f"exit code {done.returncode}"


def call(name, arguments):
    """A tool of the task's own, which runs outside."""
    url = f"http://127.0.0.1:8000/tools/{name}"
    request = urllib.request.Request(url, json.dumps(arguments).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["content"]


BASH = {
    "name": "bash",
    "description": "Run a bash command in the current folder and return what it prints.",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
#: {"name", "description", "parameters"} of every tool
SCHEMAS = [BASH] if TASK["workspace"] else TASK["tools"]


def use(name, arguments):
    """Run a tool by its name."""
    if TASK["workspace"]:
        return bash(**arguments) if name == "bash" else "error: no such tool"
    return call(name, arguments)


def functions():
    """The tools as functions with signatures of strings."""
    return [bash] if TASK["workspace"] else [_function(schema) for schema in SCHEMAS]


def _function(schema):
    names = list(schema["parameters"]["properties"])

    def tool(*args, **kwargs):
        return call(schema["name"], {**dict(zip(names, args, strict=False)), **kwargs})

    tool.__name__ = tool.__qualname__ = schema["name"]
    tool.__doc__ = schema["description"] + "\n\nArgs:\n" + "\n".join(f"    {name}: Text." for name in names)
    tool.__annotations__ = {**dict.fromkeys(names, str), "return": str}
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, keyword, annotation=str) for name in names]
    tool.__signature__ = inspect.Signature(parameters, return_annotation=str)
    return tool


def answer(text):
    Path("/workspace/.answer").write_text(str(text), encoding="utf-8")
    print(text)
