"""Tool-call formats: how a model reads of tools, calls them and reads what came back, in thousands of ways."""

from forge.formats.base import CannotCarryError, ToolCall, ToolFormat, ToolResult, ToolStream
from forge.formats.registry import FAMILIES, PUBLISHED, formats, get, tool_prompting

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "CannotCarryError",
    "ToolCall",
    "ToolFormat",
    "ToolResult",
    "ToolStream",
    "formats",
    "get",
    "tool_prompting",
]
