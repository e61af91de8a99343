"""The draws that policies see."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def draw(seed: int, life: int, call: int) -> float:
    """The `call`-th draw in [0, 1) of a life of a run: splitmix64, a pure function of its arguments."""
    z = (seed * 0x9E3779B97F4A7C15 + life * 0xA0761D6478BD642F + (call + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return float((z ^ (z >> 31)) >> 11) / float(1 << 53)
