"""Between the pool and the trainer: which trajectories of a batch to learn from, and how to cut it up.

Pure functions, chosen by `kind` in TOML like policies. Adding one: write the class here, add it to its union below.
A processor never changes what is consumed: the items of a batch are committed as a whole, whatever is left of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

from pydantic import Discriminator

from forge.policies.scheduler import FORBID
from forge.types import ForgeError, Trajectory

Group = Sequence[Trajectory]
T = TypeVar("T")


class Processor(Protocol):
    """Contract: pure. Returns groups to learn from, in the order given, perhaps fewer, smaller or with other rewards.

    A group that is left out was consumed all the same; it contributes no samples.
    """

    def process(self, groups: Sequence[Group]) -> list[Group]: ...


class Batcher(Protocol):
    """Contract: pure. Cuts `units` (groups, or samples) into runs that keep the order; none is empty or lost.

    `tokens` gives the size of a unit.
    """

    def split(self, units: Sequence[T], tokens: Callable[[T], int]) -> list[list[T]]: ...


def sampled(member: Trajectory) -> bool:
    """Whether there is anything to learn from: it was scored, and it called the model."""
    return member.outcome.reward is not None and bool(member.completions)


def longest_context(member: Trajectory) -> int:
    """Tokens of its longest completion, prompt included: the sequence the trainer must fit."""
    return max((len(c.prompt_ids) + len(c.sampled_ids) for c in member.completions), default=0)


# --- processors ------


@dataclass(kw_only=True)
class Survivors:
    """Drop members that died or never called the model, then groups with fewer than `least` left: no baseline."""

    __pydantic_config__ = FORBID
    kind: Literal["survivors"] = "survivors"
    least: int = 2

    def __post_init__(self) -> None:
        if self.least < 1:
            raise ForgeError(f"least = {self.least}: must be at least 1")

    def process(self, groups: Sequence[Group]) -> list[Group]:
        return _keep(groups, sampled, self.least)


@dataclass(kw_only=True)
class DropZeroVariance:
    """Drop groups whose members all got the same outcome reward: their advantages are all zero."""

    __pydantic_config__ = FORBID
    kind: Literal["drop_zero_variance"] = "drop_zero_variance"

    def process(self, groups: Sequence[Group]) -> list[Group]:
        return [g for g in groups if len({m.outcome.reward for m in g if m.outcome.reward is not None}) > 1]


@dataclass(kw_only=True)
class MaxTokens:
    """Drop members whose longest context exceeds `limit`, then groups with fewer than `least` left.

    A guard for the trainer's memory. It biases what is learned towards short trajectories; it is no substitute for
    the engine's own context limit.
    """

    __pydantic_config__ = FORBID
    kind: Literal["max_tokens"] = "max_tokens"
    limit: int
    least: int = 2

    def __post_init__(self) -> None:
        for key, value in (("limit", self.limit), ("least", self.least)):
            if value < 1:
                raise ForgeError(f"{key} = {value}: must be at least 1")

    def process(self, groups: Sequence[Group]) -> list[Group]:
        return _keep(groups, lambda m: longest_context(m) <= self.limit, self.least)


@dataclass(kw_only=True)
class Chain:
    """Processors one after another."""

    __pydantic_config__ = FORBID
    kind: Literal["chain"] = "chain"
    steps: tuple[AnyProcessor, ...]

    def process(self, groups: Sequence[Group]) -> list[Group]:
        result = list(groups)
        for step in self.steps:
            result = step.process(result)
        return result


AnyProcessor = Annotated[Survivors | DropZeroVariance | MaxTokens | Chain, Discriminator("kind")]


def _keep(groups: Sequence[Group], wanted: Callable[[Trajectory], bool], least: int) -> list[Group]:
    kept: list[Group] = [[m for m in group if wanted(m)] for group in groups]
    return [group for group in kept if len(group) >= least]


# --- batchers ------


@dataclass(kw_only=True)
class ByItems:
    """`items` units each; the last may have fewer."""

    __pydantic_config__ = FORBID
    kind: Literal["by_items"] = "by_items"
    items: int = 1

    def __post_init__(self) -> None:
        if self.items < 1:
            raise ForgeError(f"items = {self.items}: must be at least 1")

    def split(self, units: Sequence[T], tokens: Callable[[T], int]) -> list[list[T]]:  # noqa: ARG002 - the slot's
        return [list(units[start : start + self.items]) for start in range(0, len(units), self.items)]


@dataclass(kw_only=True)
class ByTokens:
    """As many units as fit into `budget` tokens; a longer one stands alone, as a unit is never cut."""

    __pydantic_config__ = FORBID
    kind: Literal["by_tokens"] = "by_tokens"
    budget: int = 8192

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ForgeError(f"budget = {self.budget}: must be at least 1")

    def split(self, units: Sequence[T], tokens: Callable[[T], int]) -> list[list[T]]:
        batches: list[list[T]] = []
        room = 0
        for unit in units:
            size = tokens(unit)
            if not batches or size > room:
                batches.append([])
                room = self.budget
            batches[-1].append(unit)
            room -= size
        return batches


AnyBatcher = Annotated[ByItems | ByTokens, Discriminator("kind")]
