"""`calc`: one calculator call. Two to four operands of one or two digits, at most one product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from forge.domains.base import PureDomain, Split, Task
from forge.domains.splits import Draft, draw_task
from forge.domains.tools import CALC_TOOL, calculate, evaluate, unknown_tool


def _draft(rng: Random) -> Draft:
    count = rng.randint(2, 4)
    product_at = rng.randrange(count - 1)
    parts = [str(rng.randint(2, 99))]
    for index in range(count - 1):
        # At most one product keeps values to five digits, so that copying the result is not the hard part.
        parts += ["*" if index == product_at else rng.choice("+-"), str(rng.randint(2, 99))]
    expression = "".join(parts)
    data = {"expression": expression, "answer": str(evaluate(expression))}
    return Draft(problem=expression, prompt=f"Compute {expression}", difficulty=float(count), data=data)


class Calc(PureDomain):
    """`difficulty` is the number of operands, 2 to 4."""

    name = "calc"
    max_turns = 4
    max_tokens = 32

    def task(self, split: Split, seed: int, index: int) -> Task:
        return draw_task(self.name, split, seed, index, _draft)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        return [CALC_TOOL]

    def call(self, task: Task, name: str, arguments: Mapping[str, Any]) -> str:  # noqa: ARG002
        if name != "calc":
            raise unknown_tool(name)
        return calculate(arguments)

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["answer"])
