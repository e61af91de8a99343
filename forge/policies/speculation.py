"""Speculation: how many tokens an instance drafts a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from forge.policies.scheduler import FORBID
from forge.types import ForgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftView:
    """Of one instance, about steps of `rows` decoding requests. By depth, from 0 to the deepest that the head drafts:
    `tokens` that a step yields a row, as drafts are accepted now, and its seconds, `step_s`."""

    rows: int
    tokens: tuple[float, ...]
    step_s: tuple[float, ...]


class Speculation(Protocol):
    """Contract: `depth` is a pure function of the view and one of its depths. An instance asks by itself whenever its
    batch changes, so calls are neither traced nor given a draw."""

    def depth(self, view: DraftView) -> int: ...


@dataclass(kw_only=True)
class Off:
    """Nothing is drafted."""

    __pydantic_config__ = FORBID
    kind: Literal["off"] = "off"

    def depth(self, view: DraftView) -> int:  # noqa: ARG002 - the slot's signature
        return 0


@dataclass(kw_only=True)
class Fixed:
    """`tokens` a step whatever the batch, as engines are set up by flag. The head must draft as many."""

    __pydantic_config__ = FORBID
    kind: Literal["fixed"] = "fixed"
    tokens: int = 3

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ForgeError(f"tokens = {self.tokens}: must be at least 1; kind = 'off' drafts none")

    def depth(self, view: DraftView) -> int:
        if self.tokens >= len(view.tokens):
            raise ForgeError(
                f"policy.speculation.tokens = {self.tokens}: the head drafts {len(view.tokens) - 1} at most"
            )
        return self.tokens


@dataclass(kw_only=True)
class CostAware:
    """The depth with most tokens a second, E[tokens] / step seconds. Speculation breaks even where that is depth 0's.

    `margin`: a depth above 0 must gain at least that share over drafting nothing: what acceptance and cost are not
    known to.
    """

    __pydantic_config__ = FORBID
    kind: Literal["cost_aware"] = "cost_aware"
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.margin < 1.0:
            raise ForgeError(f"margin = {self.margin:g}: must lie in [0, 1)")

    def depth(self, view: DraftView) -> int:
        rates = [tokens / seconds for tokens, seconds in zip(view.tokens, view.step_s, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > (1.0 + self.margin) * rates[0] else 0
