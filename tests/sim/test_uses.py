"""KV retention: who is given up first, and what that is worth where agents end and others wait for their tools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from agent_scenarios import agents
from hypothesis import given
from hypothesis import strategies as st

from forge import trace as ev
from forge.policies import ComesBack, KvRetention, Lru
from sim.kv import ChainCache
from sim.machines import machines
from sim.uses import Uses
from sim.world import simulate

asks = st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), max_size=3, unique=True))
overs = st.integers(0, 4)


@given(st.lists(asks | overs, max_size=40))
def test_comes_back_forgets_what_nobody_under_way_has_used(steps: list[Any]) -> None:
    told: list[int] = []
    uses = Uses(ComesBack(), told.extend)
    used: dict[int, list[int]] = {}
    for step in steps:
        told.clear()
        if isinstance(step, int):
            mine = used.pop(step, [])
            uses.over(step)
            others = {chain for chains in used.values() for chain in chains}
            assert told == [chain for chain in reversed(mine) if chain not in others], "the last chain of a path first"
        else:
            session, chains = step
            uses.asks(session, tuple((chain, 1) for chain in chains))
            known = used.setdefault(session, [])
            known += [chain for chain in chains if chain not in known]
            assert told == []


def test_lru_forgets_nothing() -> None:
    told: list[int] = []
    uses = Uses(Lru(), told.extend)
    uses.asks("a", ((1, 2),))
    uses.over("a")
    assert told == []


# --- in a cache ------


def held(cache: ChainCache) -> dict[int, int]:
    return {chain: entry.stored for chain, entry in cache.entries.items()}


def filled(*chains: int, spill: Callable[[int, int, int], None] | None = None) -> ChainCache:
    cache = ChainCache(spill=spill)
    for chain in chains:
        cache.insert(((chain, 2),), 2)
    return cache


def test_left_chains_go_first_and_to_no_tier() -> None:
    spilled: list[int] = []
    cache = filled(1, 2, 3, spill=lambda *gone: spilled.append(gone[0]))
    cache.forget(3)
    cache.evict(3)
    assert held(cache) == {1: 1, 2: 2}
    assert spilled == [1]


def test_who_asks_again_is_remembered() -> None:
    cache = filled(1, 2, 3)
    cache.forget(1)
    cache.release(cache.hold(((1, 2),)))
    cache.evict(2)
    assert held(cache) == {1: 2, 3: 2}


def test_a_chain_in_use_is_left_when_it_is_released() -> None:
    cache = filled(1, 2)
    holders = cache.hold(((2, 2),))
    cache.forget(2)
    cache.evict(1)
    assert held(cache) == {1: 1, 2: 2}
    cache.release(holders)
    cache.evict(1)
    assert held(cache) == {1: 1, 2: 1}


# --- in a run ------


def found(kv: KvRetention, **sim: Any) -> float:
    """The share of prompt tokens that instances found cached, memory being short: over three seeds, as what is kept
    shifts every arrival after it. Where running requests alone fill the memory, at half as much, nothing is gained."""
    shares = []
    for seed in range(3):
        policy = {"kv": {"kind": kv.kind}}  # type: ignore[attr-defined]
        run = simulate(agents(items=60, seed=seed, deployment={"kv_tokens": 20_000}, policy=policy, sim=sim))
        used = [e for e in run.events if isinstance(e, ev.Usage)][-1]
        shares.append(sum(used.cached_tokens) / (sum(used.cached_tokens) + sum(used.prefill_tokens)))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("sim", [{}, {"tiers": {"l2_gib": 1.0, "l3_gib": 2.0}}])
def test_more_is_found_where_the_dead_go_first(sim: dict[str, Any]) -> None:
    assert found(ComesBack(), **sim) > found(Lru(), **sim) + 0.005


def test_prefill_instances_forget_too() -> None:
    scenario = agents(
        items=24, deployment={"kv_tokens": 9100, "prefill": {"instances": 2}}, policy={"kv": {"kind": "comes_back"}}
    )
    assert machines(scenario).front < len(machines(scenario).instances)
    assert simulate(scenario).events == simulate(scenario).events
