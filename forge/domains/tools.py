"""The tools that domains offer: their schemas, strict arguments, and a calculator that never calls eval."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from forge.domains.base import Environment, PureDomain, Task, ToolError

_MAX_EXPRESSION = 64
_MAX_VALUE = 10**15
_EXPRESSION = re.compile(r"[0-9+\-*() ]+")
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def function_schema(name: str, description: str, *arguments: str) -> dict[str, Any]:
    """An OpenAI tool schema for a function of string arguments, all required."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"} for argument in arguments},
        "required": list(arguments),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


CALC_TOOL = function_schema("calc", "Evaluate an integer expression with + - * and parentheses.", "expression")
LOOKUP_TOOL = function_schema("lookup", "Return the value stored under a key.", "key")


def string_arguments(arguments: Mapping[str, Any], *names: str) -> list[str]:
    """The string arguments `names`; anything missing, extra or of another type is the model's error."""
    if set(arguments) != set(names):
        expected = ", ".join(names) or "none"
        raise ToolError(f"expected the argument{'s' * (len(names) != 1)} {expected}", kind="arguments")
    for name in names:
        if not isinstance(arguments[name], str):
            raise ToolError(f"{name} is not a string", kind="arguments")
    return [arguments[name] for name in names]


def evaluate(expression: str) -> int:
    """The value of an integer expression of + - * and parentheses, at most 64 characters and 15 digits."""
    if len(expression) > _MAX_EXPRESSION:
        raise ToolError("expression too long")
    if not _EXPRESSION.fullmatch(expression):
        raise ToolError("bad expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("bad expression") from None
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _bounded(_BINARY[type(node.op)](_value(node.left), _value(node.right)))
    raise ToolError("bad expression")


def _bounded(value: int) -> int:
    if abs(value) > _MAX_VALUE:
        raise ToolError("value too large")
    return value


def calculate(arguments: Mapping[str, Any]) -> str:
    """The `calc` tool."""
    (expression,) = string_arguments(arguments, "expression")
    return str(evaluate(expression))


def look_up(table: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
    """The `lookup` tool over `table`."""
    (key,) = string_arguments(arguments, "key")
    if key not in table:
        raise ToolError("no such key")
    return table[key]


def unknown_tool(name: str) -> ToolError:
    """For a call of a tool the domain does not offer."""
    return ToolError("no such tool" if name else "the call names no tool", kind="unknown_tool")


def run_tool(domain: PureDomain, task: Task, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """(what the model is told, whether the call worked). The text of a failure is what experts showed the model."""
    try:
        return domain.call(task, name, arguments), True
    except ToolError as error:
        return failed(error), False


async def use_tool(environment: Environment, name: str, arguments: str) -> tuple[str, bool]:
    """The same of a call as a model writes it, arguments in JSON, in an environment."""
    text, kind = await try_call(environment.call, name, arguments)
    return text, not kind


async def try_call(
    call: Callable[[str, Mapping[str, Any]], Awaitable[str]], name: str, arguments: str
) -> tuple[str, str]:
    """What the model is told of a call, and of what kind (ToolError) its error is; "" for none."""
    try:
        return await call(name, parsed(arguments)), ""
    except ToolError as error:
        return failed(error), error.kind


def parsed(arguments: str) -> dict[str, Any]:
    """The arguments of a call. Raises ToolError."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        raise ToolError("arguments are not JSON", kind="arguments") from None
    if not isinstance(found, dict):
        raise ToolError("arguments are not an object", kind="arguments")
    return found


def failed(error: ToolError) -> str:
    return f"error: {error}"
