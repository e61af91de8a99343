"""The sandbox's tools over the Model Context Protocol, on standard input and output: `forge sandbox mcp`."""

from __future__ import annotations

from typing import Any

from mcp.server import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from forge.domains.base import ToolError
from forge.sandbox.base import Limits, Sandbox
from forge.sandbox.tools import TOOLS, use


def server(sandbox: Sandbox, limits: Limits) -> Server[dict[str, Any]]:
    """What a model did wrong is a result with `isError`, as the protocol asks."""
    functions = [tool["function"] for tool in TOOLS]
    listed = [Tool(name=f["name"], description=f["description"], input_schema=f["parameters"]) for f in functions]

    async def tools(context: Any, request: Any) -> ListToolsResult:  # noqa: ARG001
        return ListToolsResult(tools=listed)

    async def call(context: Any, request: CallToolRequestParams) -> CallToolResult:  # noqa: ARG001
        try:
            text, failed = await use(sandbox, request.name, request.arguments or {}, limits), False
        except ToolError as error:
            text, failed = f"error: {error}", True
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=failed)

    return Server("forge-sandbox", on_list_tools=tools, on_call_tool=call)


async def serve(sandbox: Sandbox, limits: Limits) -> None:
    """Until the client closes our standard input."""
    one = server(sandbox, limits)
    async with stdio_server() as (requests, replies):
        await one.run(requests, replies, one.create_initialization_options())
