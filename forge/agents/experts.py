"""Scripted experts that show the warm start how tasks are done, and how they are given up.

Their sloppiness is declared, so that reinforcement learning has something honest to remove: every figure of what
was learnt is to be read against it. `PERFECT` solves every task. The one token "unknown" is the commonest wrong
answer on purpose: were it a random number, greedy decoding would hide the sloppiness.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from forge.domains.base import PureDomain, Task, opening
from forge.domains.tools import run_tool
from forge.types import ForgeError, Json

GIVE_UP = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sloppiness:
    """Probabilities in [0, 1]. Those `per_*` apply independently at each occasion."""

    #: answer "unknown" at once: calc and products
    calc_give_up: float = 0.0
    #: send the calculator a wrong operator
    calc_wrong_operator: float = 0.0
    #: answer "unknown" at once: shop
    shop_give_up: float = 0.0
    #: leave the last item of an order of two or more out
    shop_forget_item: float = 0.0
    #: leave one quantity out of the sum
    shop_forget_quantity: float = 0.0
    #: answer "unknown" after the lookups instead of adding up
    shop_stop_short: float = 0.0
    #: answer "unknown" before each lookup of a chain
    chain_give_up_per_hop: float = 0.0
    #: answer with the last key, one link early
    chain_stop_early: float = 0.0
    #: answer "unknown" to a question without tools
    direct_give_up: float = 0.0
    #: look a key up that does not exist, read the error and go on
    typo_per_lookup: float = 0.0


PERFECT = Sloppiness()
SLOPPY = Sloppiness(
    calc_give_up=0.55,
    calc_wrong_operator=0.2,
    shop_give_up=0.55,
    shop_forget_item=0.15,
    shop_forget_quantity=0.15,
    shop_stop_short=0.2,
    chain_give_up_per_hop=0.25,
    chain_stop_early=0.15,
    direct_give_up=0.55,
    typo_per_lookup=0.03,
)


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of an expert."""

    name: str
    arguments: Mapping[str, str]


#: Yields calls, is sent their results, returns the final answer.
Script = Generator[Call, str, str]


def _calc(expression: str, rng: Random, sloppiness: Sloppiness) -> Script:
    if rng.random() < sloppiness.calc_give_up:
        return GIVE_UP
    if rng.random() < sloppiness.calc_wrong_operator:
        expression = _with_wrong_operator(expression, rng)
    return (yield Call("calc", {"expression": expression}))


def _with_wrong_operator(expression: str, rng: Random) -> str:
    places = [index for index, character in enumerate(expression) if character in "+-*"]
    place = rng.choice(places)
    wrong = rng.choice([character for character in "+-*" if character != expression[place]])
    return expression[:place] + wrong + expression[place + 1 :]


def _lookup(key: str, rng: Random, sloppiness: Sloppiness) -> Script:
    if rng.random() < sloppiness.typo_per_lookup:
        yield Call("lookup", {"key": key + key[-1]})
    return (yield Call("lookup", {"key": key}))


def _calc_expert(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:
    return (yield from _calc(task.data["expression"], rng, sloppiness))


def _products_expert(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:
    return (yield from _calc("*".join(map(str, task.data["numbers"])), rng, sloppiness))


def _shop_expert(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:
    if rng.random() < sloppiness.shop_give_up:
        return GIVE_UP
    items, quantities = list(task.data["items"]), list(task.data["quantities"])
    if len(items) > 1 and rng.random() < sloppiness.shop_forget_item:
        items.pop()
        quantities.pop()
    prices = []
    for item in items:
        prices.append((yield from _lookup(item, rng, sloppiness)))  # noqa: PERF401 - comprehensions cannot yield
    if rng.random() < sloppiness.shop_stop_short:
        return GIVE_UP
    terms = [f"{quantity}*{price}" for quantity, price in zip(quantities, prices, strict=True)]
    if rng.random() < sloppiness.shop_forget_quantity:
        place = rng.randrange(len(terms))
        terms[place] = prices[place]
    return (yield Call("calc", {"expression": "+".join(terms)}))


def _chain_expert(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:
    path = task.data["path"]
    value, links = str(path[0]), len(path) - 1
    if links > 1 and rng.random() < sloppiness.chain_stop_early:
        links -= 1
    for _ in range(links):
        if rng.random() < sloppiness.chain_give_up_per_hop:
            return GIVE_UP
        value = yield from _lookup(value, rng, sloppiness)
    return value


def _direct_expert(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:
    # A script without calls is still a generator.
    yield from ()
    return GIVE_UP if rng.random() < sloppiness.direct_give_up else str(task.data["answer"])


def _coding_expert(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:  # noqa: ARG001 - it knows no other way
    path, solution = str(task.data["path"]), str(task.data["solution"])
    before = yield Call("read_file", {"path": path})
    if task.data["kind"] == "write":
        yield Call("edit_file", {"path": path, "old": before, "new": solution})
    else:
        yield Call("write_file", {"path": path, "text": solution})
    if path.endswith(".py"):
        yield Call("bash", {"command": f"python3 -m doctest {path}"})
    return "done"


EXPERTS: dict[str, Callable[[Task, Random, Sloppiness], Script]] = {
    "calc": _calc_expert,
    "chain": _chain_expert,
    "coding": _coding_expert,
    "gcd": _direct_expert,
    "products": _products_expert,
    "shop": _shop_expert,
}


def script_of(task: Task, rng: Random, sloppiness: Sloppiness) -> Script:
    """What the domain's expert does. Raises ForgeError where the domain has none."""
    if task.domain not in EXPERTS:
        raise ForgeError(f"domain {task.domain!r} has no expert; those with one: {', '.join(sorted(EXPERTS))}")
    return EXPERTS[task.domain](task, rng, sloppiness)


def demonstrate(domain: PureDomain, task: Task, rng: Random, sloppiness: Sloppiness) -> list[Json]:
    """A whole conversation in OpenAI shape, with real tool results; the last message is the final answer."""
    messages = opening(task)
    script = script_of(task, rng, sloppiness)
    try:
        call = next(script)
        while True:
            result, _ = run_tool(domain, task, call.name, call.arguments)
            messages += _exchange(f"call_{len(messages)}", call, result)
            call = script.send(result)
    except StopIteration as stop:
        answer: Any = stop.value
    return [*messages, {"role": "assistant", "content": str(answer)}]


def _exchange(call_id: str, call: Call, result: str) -> list[Json]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    tool_call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    ]
