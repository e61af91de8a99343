"""The tools that domains offer: their schemas, strict arguments, and a calculator that never calls eval."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

from forge.domains.base import Domain, Task, ToolError

_MAX_EXPRESSION = 64
_MAX_VALUE = 10**15
_EXPRESSION = re.compile(r"[0-9+\-*() ]+")
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def function_schema(name: str, description: str, argument: str) -> dict[str, Any]:
    """An OpenAI tool schema for a function of one string argument."""
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


CALC_TOOL = function_schema("calc", "Evaluate an integer expression with + - * and parentheses.", "expression")
LOOKUP_TOOL = function_schema("lookup", "Return the value stored under a key.", "key")


def string_argument(arguments: Mapping[str, Any], name: str) -> str:
    """The one string argument `name`; anything missing, extra or of another type is the model's error."""
    if set(arguments) != {name}:
        raise ToolError(f"expected the argument {name}")
    value = arguments[name]
    if not isinstance(value, str):
        raise ToolError(f"{name} is not a string")
    return value


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
    return str(evaluate(string_argument(arguments, "expression")))


def look_up(table: Mapping[str, str], arguments: Mapping[str, Any]) -> str:
    """The `lookup` tool over `table`."""
    key = string_argument(arguments, "key")
    if key not in table:
        raise ToolError("no such key")
    return table[key]


def unknown_tool(name: str) -> ToolError:
    """For a call of a tool the domain does not offer."""
    return ToolError("no such tool") if name else ToolError("the call names no tool")


def run_tool(domain: Domain, task: Task, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
    """(what the model is told, whether the call worked). The text of a failure is what experts showed the model."""
    try:
        return domain.call(task, name, arguments), True
    except ToolError as error:
        return f"error: {error}", False
