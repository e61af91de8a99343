"""Families of the public reasoning-gym package, with its own verifiers.

`gcd` has no tool: the model must know the answer, so it is the control that says how much is more than tool use.
`products` gets the calculator. The package is heavy to import (sympy and more), so it is imported at first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any

from forge.domains.base import PureDomain, Split, Task
from forge.domains.splits import Draft, draw_task
from forge.domains.tools import CALC_TOOL, calculate, unknown_tool

# reasoning-gym seeds item i with seed + i; this many distinct items leave the hash split plenty to choose from.
_ITEMS = 2**31 - 1


@cache
def _dataset(family: str, options: tuple[tuple[str, int], ...]) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=0, size=_ITEMS, **dict(options))


class ReasoningGym(PureDomain):
    """One family. `problem` names the numbers of an item in any order, so 12, 18 and 18, 12 share a split."""

    max_turns = 3

    def __init__(
        self,
        name: str,
        *,
        options: Mapping[str, int],
        numbers: Callable[[Mapping[str, Any]], list[int]],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int = 32,
    ) -> None:
        self.name = name
        self.max_tokens = max_tokens
        self._options = tuple(sorted(options.items()))
        self._numbers = numbers
        self._tools = tools

    def _draft(self, rng: Random) -> Draft:
        index = rng.randrange(_ITEMS)
        item = _dataset(self.name, self._options)[index]
        numbers = self._numbers(item["metadata"])
        return Draft(
            problem=" ".join(str(number) for number in sorted(numbers)),
            prompt=item["question"],
            difficulty=float(len("".join(map(str, numbers)))),
            data={"item": index, "numbers": numbers, "answer": item["answer"]},
        )

    def task(self, split: Split, seed: int, index: int) -> Task:
        return draw_task(self.name, split, seed, index, self._draft)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        return self._tools

    def call(self, task: Task, name: str, arguments: Mapping[str, Any]) -> str:  # noqa: ARG002
        if name != "calc" or not self._tools:
            raise unknown_tool(name)
        return calculate(arguments)

    def score(self, task: Task, answer: str) -> float:
        """1 when reasoning-gym's verifier gives full marks. Its part marks (the answer occurs somewhere in the
        text) would reward naming many numbers, so they count as 0."""
        dataset = _dataset(self.name, self._options)
        return float(dataset.score_answer(answer.strip(), dataset[task.data["item"]]) >= 1.0)


def gcd() -> ReasoningGym:
    """Greatest common divisor of two numbers up to 40, answered directly."""
    options = {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 40}
    return ReasoningGym("gcd", options=options, numbers=lambda metadata: list(metadata["numbers"]))


def products() -> ReasoningGym:
    """Product of two or three numbers of one or two digits, with the calculator."""
    options = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}

    def factors(metadata: Mapping[str, Any]) -> list[int]:
        return [int(factor) for factor in metadata["expression"].split("*")]

    return ReasoningGym("products", options=options, numbers=factors, tools=[CALC_TOOL])
