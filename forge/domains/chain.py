"""`chain`: follow links from a start key, one lookup each, until a value is a word; that word is the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from forge.domains.base import PureDomain, Split, Task
from forge.domains.shop import ITEMS
from forge.domains.splits import Draft, draw_task
from forge.domains.tools import LOOKUP_TOOL, look_up, unknown_tool

# A letter and a number: two tokens to copy, and no key is a word the tokenizer knows.
KEYS = tuple(f"{letter}{number}" for letter in "abcdefghijklmnopqrstuvwxyz" for number in range(10, 100))
_MAX_LINKS = 7


def _draft(rng: Random) -> Draft:
    links = rng.randint(1, _MAX_LINKS)
    path = [*rng.sample(KEYS, links), rng.choice(ITEMS)]
    table = dict(pairwise(path))
    prompt = f"Follow links from {path[0]}"
    data = {"path": path, "table": table, "answer": path[-1]}
    # The start key alone is the problem: the walk behind it is drawn anew per task, as a table of prices is.
    return Draft(problem=path[0], prompt=prompt, difficulty=float(links), data=data)


class Chain(PureDomain):
    """`difficulty` is the number of links, 1 to 7; a perfect run takes that many lookups and one answer."""

    name = "chain"
    max_turns = 10
    max_tokens = 24

    def task(self, split: Split, seed: int, index: int) -> Task:
        return draw_task(self.name, split, seed, index, _draft)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:  # noqa: ARG002
        return [LOOKUP_TOOL]

    def call(self, task: Task, name: str, arguments: Mapping[str, Any]) -> str:
        if name != "lookup":
            raise unknown_tool(name)
        return look_up(task.data["table"], arguments)

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == task.data["answer"])
