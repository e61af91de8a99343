"""The scaffold zoo: what an agent's loop, its tool calls, its context and its prompt may be. Pure."""

from forge.scaffolds.parts import CONTEXTS, DIALECTS, LOOPS, NATIVE, RESULTS, STRATEGIES, STYLES
from forge.scaffolds.zoo import DEFAULT, QUICKSTART, Scaffold, combination, drawn, get, select, small, zoo

__all__ = [
    "CONTEXTS",
    "DEFAULT",
    "DIALECTS",
    "LOOPS",
    "NATIVE",
    "QUICKSTART",
    "RESULTS",
    "STRATEGIES",
    "STYLES",
    "Scaffold",
    "combination",
    "drawn",
    "get",
    "select",
    "small",
    "zoo",
]
