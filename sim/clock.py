"""Simulated time is whole femtoseconds: sums are exact, so a jump over many iterations ends where stepping would.

A token's share of an iteration may be nanoseconds; in whole nanoseconds its rounding would add up over a run.
"""

from __future__ import annotations

from forge.types import LONGEST_S, ForgeError

FS = 1_000_000_000_000_000


def to_fs(seconds: float) -> int:
    if not -LONGEST_S < seconds < LONGEST_S:
        raise ForgeError(f"{seconds:g} s: no time that can be simulated; give seconds below {LONGEST_S:g}")
    return round(seconds * FS)


def to_s(fs: int) -> float:
    return float(fs) / 1e15  # two roundings: of whole numbers, compiled code rounds a quotient otherwise than Python
