"""Placement: whether a prompt is computed by the instance that decodes its answer, or by one that computes prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from forge.policies.scheduler import FORBID
from forge.types import ForgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementView:
    """One request, sent to a decode instance (`here`), and the prefill instance that would be through with its prompt
    first (`there`). Tokens: of the prompt, those of it that are not cached on either side, and those of other prompts
    to be computed before it. `decoding`: requests that run here, whom a prompt would slow down."""

    prompt_tokens: int
    missing_here: int
    waiting_here: int
    decoding: int
    missing_there: int
    waiting_there: int


class Placement(Protocol):
    """Contract: `apart` is a pure function of the view: True sends the prompt to the prefill instance, False computes
    it where it is decoded. Asked for every request while a prefill instance lives; neither traced nor given a draw."""

    def apart(self, view: PlacementView) -> bool: ...


@dataclass(kw_only=True)
class Aggregated:
    """Never apart: prefill instances stand idle."""

    __pydantic_config__ = FORBID
    kind: Literal["aggregated"] = "aggregated"

    def apart(self, view: PlacementView) -> bool:  # noqa: ARG002 - the slot's signature
        return False


@dataclass(kw_only=True)
class Disaggregated:
    """Always apart."""

    __pydantic_config__ = FORBID
    kind: Literal["disaggregated"] = "disaggregated"

    def apart(self, view: PlacementView) -> bool:  # noqa: ARG002 - the slot's signature
        return True


@dataclass(kw_only=True)
class Conditional:
    """Apart where at least `local_below` tokens of the prompt are not cached here: short and cached prompts stay, as in
    Dynamo's conditional disaggregation."""

    __pydantic_config__ = FORBID
    kind: Literal["conditional"] = "conditional"
    local_below: int = 512

    def __post_init__(self) -> None:
        if self.local_below < 0:
            raise ForgeError(f"local_below = {self.local_below}: must not be negative")

    def apart(self, view: PlacementView) -> bool:
        return view.missing_here >= self.local_below


@dataclass(kw_only=True)
class LeastDelay:
    """Wherever all requests together lose fewer seconds: this one until its first token, and here also everyone who
    decodes, for as long as its prompt is computed beside them. Ties stay here.

    `token_s`: to compute a token of a prompt; `transfer_token_s`: for a token's KV to cross; the deployment's.
    """

    __pydantic_config__ = FORBID
    kind: Literal["least_delay"] = "least_delay"
    token_s: float = 1.6e-4
    transfer_token_s: float = 3.8e-6

    def __post_init__(self) -> None:
        for key in ("token_s", "transfer_token_s"):
            if not 0.0 < getattr(self, key) < 1.0:
                raise ForgeError(f"{key} = {getattr(self, key):g}: must be seconds of one token, in (0, 1)")

    def apart(self, view: PlacementView) -> bool:
        here = (view.waiting_here + view.missing_here * (1 + view.decoding)) * self.token_s
        there = (view.waiting_there + view.missing_there) * self.token_s + view.prompt_tokens * self.transfer_token_s
        return there < here
