"""The domain mix: which domain the next position draws from, held over any N consecutive submissions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache


class Mix:
    """Smooth weighted round robin: after j positions every domain's count is within one of its share of j.

    Deterministic, so that a resumed run and the simulator give position j the same domain.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}
        self._credit = dict.fromkeys(weights, 0.0)
        self._domains: list[str] = []

    def domain(self, position: int) -> str:
        while len(self._domains) <= position:
            for name, share in self._shares.items():
                self._credit[name] += share
            chosen = max(self._credit, key=lambda name: self._credit[name])
            self._credit[chosen] -= 1.0
            self._domains.append(chosen)
        return self._domains[position]


@cache
def mix_of(weights: tuple[tuple[str, float], ...]) -> Mix:
    """The one mix of these weights, which remembers the positions it was asked about."""
    return Mix(dict(weights))
