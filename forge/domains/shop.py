"""`shop`: look up the price of each item in a table drawn per task, then let the calculator add it up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from forge.domains.base import PureDomain, Split, Task
from forge.domains.splits import Draft, draw_task
from forge.domains.tools import CALC_TOOL, LOOKUP_TOOL, calculate, look_up, unknown_tool

ITEMS = (
    *("apple", "bag", "ball", "bell", "book", "bowl", "box", "brush", "candle", "chair", "clock", "cup"),
    *("fork", "hat", "key", "kite", "knife", "lamp", "map", "mug", "pan", "pen", "plate", "rope"),
)


def _draft(rng: Random) -> Draft:
    items = rng.sample(ITEMS, rng.randint(1, 3))
    # Items outside the order are listed too: a wrong but existing key gives a price, not an error.
    table = {item: str(rng.randint(2, 49)) for item in ITEMS}
    quantities = [rng.randint(2, 9) for _ in items]
    basket = "+".join(f"{quantity}*{item}" for quantity, item in zip(quantities, items, strict=True))
    total = sum(quantity * int(table[item]) for quantity, item in zip(quantities, items, strict=True))
    data = {"items": items, "quantities": quantities, "table": table, "answer": str(total)}
    return Draft(problem=basket, prompt=f"Price of {basket}", difficulty=float(len(items)), data=data)


class Shop(PureDomain):
    """`difficulty` is the number of items, 1 to 3; a perfect run takes that many lookups, one calc, one answer."""

    name = "shop"
    max_turns = 7
    max_tokens = 32

    def task(self, split: Split, seed: int, index: int) -> Task:
        return draw_task(self.name, split, seed, index, _draft)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        return [LOOKUP_TOOL, CALC_TOOL]

    def call(self, task: Task, name: str, arguments: Mapping[str, Any]) -> str:
        if name == "lookup":
            return look_up(task.data["table"], arguments)
        if name == "calc":
            return calculate(arguments)
        raise unknown_tool(name)

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["answer"])
