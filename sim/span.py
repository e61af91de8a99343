"""A span: iterations of one batch in a row, whose ends are known without stepping through them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import sqrt


class Span:
    """`length` iterations from `at` to `end` (fs); length 0: idle.

    Where `ends` is set they end there (one full chunk of a long prompt in each). Otherwise iteration i of a batch that
    held `context` units takes `a + b * (context + i * grown)`: the k-th ends at
    `at + k a + b (k context + grown k (k - 1) / 2)`.
    """

    __slots__ = ("a", "at", "b", "context", "end", "ends", "grown", "length")

    def __init__(self) -> None:
        self.at = self.end = self.length = self.a = self.b = self.context = self.grown = 0
        self.ends: list[int] = []

    def set(self, length: int) -> None:
        """`length` iterations of the one batch."""
        self.length = length
        self.end = self.at + length * (self.a + self.b * self.context)
        if length > 1:
            self.end += self.b * self.grown * (length * (length - 1) // 2)

    def end_of(self, k: int) -> int:
        if self.ends:
            return self.ends[k - 1]
        return self.at + k * (self.a + self.b * self.context) + self.b * self.grown * (k * (k - 1) // 2)

    def complete(self, now: int) -> int:
        """Iterations that end at `now` or before."""
        if not self.length or now <= self.at:
            return 0
        if now >= self.end:
            return self.length
        if self.ends:
            return bisect_right(self.ends, now, 0, self.length)
        k = self.begun_before(now)
        return k if self.end_of(k) <= now else k - 1

    def begun_before(self, now: int) -> int:
        """Iterations that begin before `now`; at least 1, the one already planned."""
        if self.length <= 1 or now <= self.at:
            return 1 if self.length else 0
        if now >= self.end:
            return self.length
        if self.ends:
            return 1 + bisect_left(self.ends, now, 0, self.length)
        # The smallest k with end_of(k) >= now: the root in floats, then exact.
        left = now - self.at
        square = self.b * self.grown
        linear = 2 * (self.a + self.b * self.context) - square
        if square:
            k = int((sqrt(float(linear) * linear + 8.0 * square * left) - linear) / (2 * square)) + 1
        else:
            k = -(-2 * left // linear)
        while self.end_of(k) < now:
            k += 1
        while k > 1 and self.end_of(k - 1) >= now:
            k -= 1
        return k

    def cut(self, now: int, least: int = 1) -> None:
        """End at the first boundary that is not before `now`, after `least` iterations at the earliest."""
        if self.length > least and now < self.end:
            self.length = max(self.begun_before(now), least)
            self.end = self.end_of(self.length)
