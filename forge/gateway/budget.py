"""What one trajectory may spend. An agent that compacts, or tries again, for ever is stopped by it.

It is told with 400 and a code of our own: of the programs that were tried, every one gives up on a 400 that does not
speak of the context's length, while 429 and 5xx are asked again, some of them for ever.
"""

from __future__ import annotations

from dataclasses import dataclass


class BudgetSpent(Exception):  # noqa: N818 - a state, not a fault
    """The trajectory may generate no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Generations and sampled tokens of one trajectory; 0: any number. What is under way when the last token is spent
    still ends, so a trajectory may overdraw by the requests it has in flight at once."""

    calls: int = 0
    tokens: int = 0

    def check(self, calls: int, tokens: int) -> None:
        """Of a trajectory that has begun so many calls and got so many tokens. Raises BudgetSpent."""
        for spent, most, what in ((calls, self.calls, "calls"), (tokens, self.tokens, "sampled tokens")):
            if 0 < most <= spent:
                raise BudgetSpent(f"This trajectory is over: its budget of {most} {what} is spent.")
