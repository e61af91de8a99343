"""Simulated time is whole nanoseconds: sums are exact, so a jump over many iterations ends where stepping would."""

from __future__ import annotations

NS = 1_000_000_000


def to_ns(seconds: float) -> int:
    return round(seconds * NS)


def to_s(ns: int) -> float:
    return ns / NS
