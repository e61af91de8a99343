"""The tools of an agent with a workspace: commands and files, each answered in text, never with an exception but
`ToolError` for what the model did wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge.domains.base import ToolError
from forge.domains.tools import function_schema, string_arguments, unknown_tool
from forge.sandbox.base import Limits, Result, Sandbox, WorkspaceError

TOOLS = (
    function_schema("bash", "Run a bash command in the workspace; nothing of it goes on afterwards.", "command"),
    function_schema("read_file", "Return the text of a file.", "path"),
    function_schema("write_file", "Make a file with this text, or replace it.", "path", "text"),
    function_schema("edit_file", "Replace old text, which must occur exactly once, by new text.", "path", "old", "new"),
    function_schema("list_files", "List the files of the workspace with their sizes in bytes."),
)
_ARGUMENTS = {tool["function"]["name"]: tuple(tool["function"]["parameters"]["properties"]) for tool in TOOLS}


async def use(sandbox: Sandbox, name: str, arguments: Mapping[str, Any], limits: Limits) -> str:
    """Run a tool. Raises ToolError."""
    if name not in _ARGUMENTS:
        raise unknown_tool(name)
    given = string_arguments(arguments, *_ARGUMENTS[name])
    try:
        if name == "bash":
            return told(await sandbox.run(given[0], limits=limits), limits)
        if name == "list_files":
            return "\n".join(f"{one.path} {'-' if one.size is None else one.size}" for one in sandbox.entries())
        if name == "read_file":
            return text_of(sandbox, given[0])
        if name == "write_file":
            sandbox.write(given[0], bytes_of(given[1]))
            return f"{given[0]} written"
        return edit(sandbox, *given)
    except WorkspaceError as error:
        raise ToolError(str(error)) from None


def edit(sandbox: Sandbox, path: str, old: str, new: str) -> str:
    text = text_of(sandbox, path)
    if (count := text.count(old) if old else 0) != 1:
        raise ToolError(f"{path}: the old text occurs {count} times, not once")
    sandbox.write(path, bytes_of(text.replace(old, new)))
    return f"{path} edited"


def text_of(sandbox: Sandbox, path: str) -> str:
    try:
        return sandbox.read(path).decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path}: not text in UTF-8") from None


def bytes_of(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which JSON can hold
        raise ToolError("the text is no Unicode text") from None


def told(result: Result, limits: Limits) -> str:
    """What the model reads of a command: its output, then whatever is not as usual."""
    lines = [f"[cut: only the first {limits.output_kib} KiB are shown]"] if result.cut else []
    if result.exit_code is None:
        lines.append(f"[ended after {result.seconds:.1f} s]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    if result.met:
        lines.append(f"[limits met: {', '.join(result.met)}]")
    return "\n".join(filter(None, [result.output.rstrip("\n"), *lines]))
