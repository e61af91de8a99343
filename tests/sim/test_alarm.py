"""Alarms far ahead ring as if they had been in SimPy's heap from the start."""

from __future__ import annotations

import simpy
from hypothesis import given
from hypothesis import strategies as st

from sim.alarm import HAPPEN, PLAN, Alarm, Later

steps = st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=1, max_size=4)


@given(st.lists(steps, min_size=1, max_size=8), st.integers(1, 12))
def test_later_changes_no_order(chains: list[list[tuple[int, bool]]], width: int) -> None:
    """Chains of alarms, each set when the one before rings: at once, later, at the same instant, with others."""

    def rung(late: bool) -> list[tuple[int, int, int]]:
        env = simpy.Environment()
        later, seen = Later(env, width), []

        def follow(chain: int, number: int) -> None:
            if number < len(chains[chain]):
                wait, plans = chains[chain][number]
                if plans:
                    Alarm(env, PLAN, ring, (chain, number)).set(env.now + wait)
                elif late:
                    later.add(env.now + wait, ring, (chain, number))
                else:
                    Alarm(env, HAPPEN, ring, (chain, number)).set(env.now + wait)

        def ring(alarm: Alarm) -> None:
            chain, number = alarm.about
            seen.append((env.now, chain, number))
            follow(chain, number + 1)

        for chain in range(len(chains)):
            follow(chain, 0)
        env.run()
        return seen

    assert rung(late=True) == rung(late=False)
