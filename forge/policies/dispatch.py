"""Dispatch: which domain the next item draws from, how many items run at once, when a request is refused (429).

A domain's tasks come in the order of positions, so that the domain is all there is to choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

from forge.mix import mix_of
from forge.policies.scheduler import FORBID
from forge.types import ForgeError
from forge.views import AdmissionView, DispatchView


class Dispatch(Protocol):
    """Contract: `next` is asked where fewer than `queue.concurrency` items run and the queue admits another. It
    returns a name of `view.domains`, or None to wait. It is asked again after every event that could change the answer
    and never on time alone, so with nothing running it does not wait.

    `refuse` is asked for every request of a trajectory before it is routed. It returns None to let it through, or the
    seconds, above 0, after which its agent is to ask again: 429 with Retry-After, live. With nothing in flight it
    refuses nothing. The wait counts against `queue.item_timeout_s`, as all of an agent's time does. `refuses` is
    constant for a run; where it is False, `refuse` is never asked.
    """

    @property
    def refuses(self) -> bool: ...

    def next(self, view: DispatchView) -> str | None: ...

    def refuse(self, view: AdmissionView) -> float | None: ...


@dataclass(kw_only=True)
class Refusing:
    """What the policies of this module share: requests are refused from so many in flight on every live instance."""

    __pydantic_config__ = FORBID
    refuse_above: int = 0  # requests in flight for each live instance; 0: none is ever refused
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        if self.refuse_above < 0:
            raise ForgeError(f"refuse_above = {self.refuse_above}: must be at least 0")
        if not 0.0 < self.retry_after_s <= 60.0:  # the stock clients believe no longer one
            raise ForgeError(f"retry_after_s = {self.retry_after_s:g}: must be seconds in (0, 60]")

    @property
    def refuses(self) -> bool:
        return self.refuse_above > 0

    def refuse(self, view: AdmissionView) -> float | None:
        full = view.in_flight >= self.refuse_above * max(1, view.instances)
        return self.retry_after_s if self.refuses and full else None


@dataclass(kw_only=True)
class Mixed(Refusing):
    """The mix, held over any N consecutive submissions, and as many at once as `queue.concurrency` allows."""

    kind: Literal["mix"] = "mix"

    def next(self, view: DispatchView) -> str | None:
        return mixed(view)


@dataclass(kw_only=True)
class Staged(Refusing):
    """One domain after another: each its share of every `round_items` items, in the scenario's order. A baseline."""

    kind: Literal["stages"] = "stages"
    round_items: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.round_items < 1:
            raise ForgeError(f"round_items = {self.round_items}: must be at least 1")

    def next(self, view: DispatchView) -> str | None:
        total = sum(one.weight for one in view.domains)
        at = view.submitted % self.round_items
        ends = accumulate(one.weight / total * self.round_items for one in view.domains)
        inside = (one.name for one, end in zip(view.domains, ends, strict=True) if at < end)
        return next(inside, view.domains[-1].name)  # shares may add up to a hair less than 1


@dataclass(kw_only=True)
class ReplaceDead(Refusing):
    """The mix held over items that are alive, so that a domain whose items die is submitted more often.

    Counts are of this life: of a resumed run, with what it found waiting.
    """

    kind: Literal["replace_dead"] = "replace_dead"

    def next(self, view: DispatchView) -> str | None:
        total = sum(one.weight for one in view.domains)
        alive = {one.name: one.submitted - one.dead for one in view.domains}
        after = sum(alive.values()) + 1
        return max(view.domains, key=lambda one: one.weight / total * after - alive[one.name]).name


@dataclass(kw_only=True)
class Paced(Refusing):
    """The mix, with as many items at once as the engines answer promptly: additive increase, multiplicative decrease.

    The limit begins at `fewest`. Whenever it keeps an item waiting, it grows by `step`; while more than `unanswered`
    requests for each live instance have no first token, it shrinks to `cut` of itself. Either at most once in
    `settle_s`, so that a change shows before the next one. It is never above `queue.concurrency`.
    """

    kind: Literal["paced"] = "paced"
    fewest: int = 4  # items at once
    unanswered: float = 2.0  # requests for each live instance that may wait for their first token
    step: int = 2
    cut: float = 0.8
    settle_s: float = 5.0
    _limit: float = field(default=0.0, init=False, repr=False)
    _changed_s: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("fewest", 1), ("step", 1), ("unanswered", 0.0), ("settle_s", 0.0)):
            if getattr(self, name) < least:
                raise ForgeError(f"{name} = {getattr(self, name)}: must be at least {least:g}")
        if not 0.0 < self.cut < 1.0:
            raise ForgeError(f"cut = {self.cut:g}: must lie between 0 and 1")

    def next(self, view: DispatchView) -> str | None:
        self._limit = self._limit or float(self.fewest)
        congested = view.unanswered > self.unanswered * max(1, view.instances)
        settled = view.now >= self._changed_s + self.settle_s
        if settled and congested:
            self._change(view, max(self.fewest, self._limit * self.cut))
        elif settled and view.running >= int(self._limit):
            self._change(view, min(view.concurrency, self._limit + self.step))
        return mixed(view) if view.running < int(self._limit) else None

    def _change(self, view: DispatchView, limit: float) -> None:
        self._limit, self._changed_s = float(limit), view.now


def mixed(view: DispatchView) -> str:
    """The domain that the mix gives the next position: the same in every life and in both worlds."""
    return mix_of(tuple((one.name, one.weight) for one in view.domains)).domain(view.submitted)
