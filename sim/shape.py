"""How large an instance is."""

from __future__ import annotations

from dataclasses import dataclass

from forge.types import ForgeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """`block` tokens a KV block, `capacity` in blocks, `budget` tokens an iteration, `seats` requests at once.

    `jump` False plans one iteration at a time: the same model, stepped.
    """

    block: int = 16
    capacity: int
    budget: int = 8192
    seats: int = 256
    jump: bool = True

    def __post_init__(self) -> None:
        if min(self.block, self.capacity, self.seats) < 1:
            raise ForgeError(f"block, capacity, seats = {self.block}, {self.capacity}, {self.seats}: must be positive")
        if self.budget <= self.seats:
            raise ForgeError(f"budget = {self.budget}: must exceed seats = {self.seats}, or no prompt is ever computed")
