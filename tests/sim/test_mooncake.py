"""Mooncake's figures: one LRU cache against blocks kept one by one, KV-centric routing, prefixes that are fetched."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.instances import InstanceView, RouterView
from forge.policies.router import Fetching, LeastLoaded
from forge.policies.router_published import CacheAware, KvCentric
from forge.types import ForgeError
from sim import mooncake
from sim.engine import Instance, Shape
from sim.fetch import Fabric
from sim.iteration import LineTimes
from sim.serve import Row, Serving
from sim.sessions import Path as Chains
from sim.sessions import Session, Step
from sim.traces.mooncake import load
from sim.traces.reading import Recorded

TRACE = Path(__file__).parents[3] / "shared" / "data" / "mooncake" / "conversation_trace.jsonl"
BLOCK = 16
#: a millisecond a prompt token, nothing else
PLAIN = LineTimes(step_s=0.0, row_s=0.0, prefill_token_s=1e-3)


def sent(*requests: tuple[float, int, Chains]) -> Recorded:
    """(start in seconds, prompt tokens, path) each."""
    steps = [Step(prompt=prompt, output=1, path=path) for _, prompt, path in requests]
    return Recorded(
        BLOCK,
        tuple(
            Session(name=str(i), start_s=start, steps=(step,))
            for i, ((start, _, _), step) in enumerate(zip(requests, steps, strict=True))
        ),
    )


# --- hit rate ------


def naive(prompts: list[tuple[int, list[int]]], capacity: int, block: int) -> float:
    """Every block on its own; a prompt's last blocks are older than its first."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for prompt, ids in prompts:
        found = 0
        while found < len(ids) and ids[found] in cache:
            found += 1
        hits += min(found, (prompt - 1) // block) * block
        for block_id in reversed(ids):
            cache.pop(block_id, None)
            cache[block_id] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return hits / sum(prompt for prompt, _ in prompts)


#: forks of a few conversations: the tokens after a fork never meet again
talks = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 15)), min_size=1, max_size=30)


@given(talks, st.integers(1, 20))
def test_chains_hit_what_blocks_kept_one_by_one_would(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[int, int, int]], capacity: int
) -> None:
    prompts = []
    for shared, talk, rest in drawn:
        ids = [*range(shared), *[100 * (1 + 5 * shared + talk) + i for i in range(shared)]]
        prompts.append((len(ids) * BLOCK + 1 + rest, ids))
    file = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = [
        {"timestamp": i, "input_length": prompt, "output_length": 1, "hash_ids": [*ids, 10_000 + i]}
        for i, (prompt, ids) in enumerate(prompts)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    trace = load(file, block=BLOCK)
    assert mooncake.hit_rate(trace, capacity * BLOCK) == naive(prompts, capacity, BLOCK)
    assert mooncake.hit_rate(trace, None) == naive(prompts, 10_000, BLOCK)


@pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE}: absent")
def test_the_published_hit_rates_come_out() -> None:
    trace = load(TRACE)
    endless = mooncake.hit_rate(trace, None)
    assert endless == pytest.approx(0.374, abs=0.001)
    shares = [mooncake.hit_rate(trace, tokens) / endless for tokens in (1e6, 3e6, 1e7, 5e7)]
    assert shares == sorted(shares)
    assert shares[1] == pytest.approx(mooncake.PUBLISHED_HIT_SHARE[3e6], rel=0.1)
    assert shares[3] > 0.98  # "about 50M tokens come near the maximum"


# --- the router ------


def view(
    prompt: int, cached: dict[int, int], queued: tuple[int, ...], in_flight: tuple[int, ...] = (), draw: float = 0.0
) -> RouterView:
    held = in_flight or (0,) * len(queued)
    return RouterView(
        now=0.0,
        draw=draw,
        trajectory="0",
        turn=0,
        prompt_tokens=prompt,
        instances=tuple(InstanceView(i, held[i], 0, tokens) for i, tokens in enumerate(queued)),
        cached=cached,
    )


def test_it_waits_for_a_prefix_or_fetches_it_by_what_takes_longer() -> None:
    router = KvCentric(token_s=1.0, transfer_token_s=0.1)
    assert isinstance(router, Fetching)
    assert not isinstance(LeastLoaded(), Fetching)
    short_queue = view(1000, {0: 800}, (50, 0))  # 50 + 200 there, 80 + 200 with a fetch
    assert router.route(short_queue) == 0
    assert router.source(short_queue, 0) is None
    long_queue = view(1000, {0: 800}, (100, 0))
    assert router.route(long_queue) == 1
    assert router.source(long_queue, 1) == 0
    assert CacheAware().route(long_queue) == 0


def test_within_the_threshold_it_computes_instead_of_fetching() -> None:
    seen = view(1000, {0: 800, 1: 500}, (400, 0))
    assert KvCentric(token_s=1.0, transfer_token_s=0.1, threshold=1.5).source(seen, 1) == 0
    router = KvCentric(token_s=1.0, transfer_token_s=0.1, threshold=1.7)
    assert router.source(seen, 1) is None
    assert router.route(seen) == 1  # 500 of its own against 400 + 200
    assert router.route(view(1000, {0: 800, 1: 500}, (200, 0))) == 0


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.floats(0, 1, exclude_max=True))
def test_with_nothing_cached_it_is_cache_aware(queued: list[int], draw: float) -> None:
    seen = view(5, {}, tuple(queued), draw=draw)
    assert KvCentric().route(seen) == CacheAware().route(seen)
    assert KvCentric().source(seen, 0) is None


def test_holders_share_the_sending_and_equals_the_load() -> None:
    seen = [view(100, {0: 80, 1: 80}, (9, 9, 0, 0), draw=k / 4) for k in range(4)]
    assert [KvCentric().source(one, 2) for one in seen] == [0, 0, 1, 1]
    other_order = [view(100, {1: 80, 0: 80}, (9, 9, 0, 0), draw=k / 4) for k in range(4)]
    assert [KvCentric().source(one, 2) for one in other_order] == [0, 0, 1, 1]
    level = [view(100, {}, (0, 0, 0, 0), draw=k / 4) for k in range(4)]
    assert [KvCentric().route(one) for one in level] == [0, 1, 2, 3]
    assert KvCentric().route(view(100, {}, (0, 0), in_flight=(1, 0))) == 1


@pytest.mark.parametrize("wrong", [{"token_s": 0.0}, {"transfer_token_s": -1.0}, {"threshold": 0.5}])
def test_impossible_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ForgeError, match=next(iter(wrong))):
        KvCentric(**wrong)  # type: ignore[arg-type]


# --- what is fetched ------


class Told:
    """Goes and fetches as it is told, request by request."""

    reads_load: ClassVar[bool] = False

    def __init__(self, *plan: tuple[int, int | None]) -> None:
        self._plan = iter(plan)
        self._next: tuple[int, int | None] = (0, None)

    def route(self, view: RouterView) -> int:  # noqa: ARG002 - the contract
        self._next = next(self._plan)
        return self._next[0]

    def source(self, view: RouterView, instance: int) -> int | None:  # noqa: ARG002 - the contract
        return self._next[1]


def served(trace: Recorded, router: Told, fabric: Fabric | None, instances: int = 3) -> tuple[list[Row], Serving]:
    shape = Shape(block=BLOCK, capacity=1000, budget=4096)
    world = Serving(trace, [Instance(PLAIN, shape, listen=True) for _ in range(instances)], router, fabric=fabric)
    return sorted(world.run(), key=lambda row: row.session), world


FABRIC = Fabric(block_s=0.01, latency_s=0.005)
#: ten blocks and a bit
PROMPT, PREFIX = 10 * BLOCK + 4, ((7, 10),)


def test_a_fetched_prefix_takes_its_time_is_hit_and_stays() -> None:
    trace = sent((0.0, PROMPT, PREFIX), (1.0, PROMPT, PREFIX), (2.0, PROMPT, PREFIX))
    rows, world = served(trace, Told((0, None), (1, 0), (1, None)), FABRIC)
    assert [row.hit for row in rows] == [0, 160, 160]
    assert [row.ttft_s for row in rows] == pytest.approx([0.164, 0.1 + 0.005 + 0.004, 0.004])
    assert world.fetched_blocks == 10


def test_only_what_lacks_is_sent() -> None:
    trace = sent((0.0, PROMPT, PREFIX), (1.0, 4 * BLOCK + 4, ((7, 4),)), (2.0, PROMPT, PREFIX), (3.0, PROMPT, PREFIX))
    rows, world = served(trace, Told((0, None), (1, None), (1, 0), (1, 0)), FABRIC)
    assert world.fetched_blocks == 6
    assert [row.ttft_s for row in rows[2:]] == pytest.approx([0.06 + 0.005 + 0.004, 0.004])


def test_a_sender_serves_one_after_another() -> None:
    trace = sent((0.0, PROMPT, PREFIX), (1.0, PROMPT, PREFIX), (1.0, PROMPT, PREFIX))
    rows, _ = served(trace, Told((0, None), (1, 0), (2, 0)), FABRIC)
    assert [row.ttft_s for row in rows[1:]] == pytest.approx([0.109, 0.209])


def test_without_a_fabric_nothing_moves() -> None:
    trace = sent((0.0, PROMPT, PREFIX), (1.0, PROMPT, PREFIX))
    rows, world = served(trace, Told((0, None), (1, 0)), None)
    assert [row.hit for row in rows] == [0, 0]
    assert world.fetched_blocks == 0
    with pytest.raises(ForgeError, match="block_s"):
        Fabric(block_s=-1.0)


# --- the set-up ------


def test_a_prefill_pool_sees_first_tokens_only() -> None:
    step = Step(prompt=40, output=9, path=((1, 2),), keep=True)
    trace = Recorded(BLOCK, (Session(name="0", start_s=3.0, steps=(step,)),))
    seen = next(mooncake.Prefills(trace, speed=2.0).sessions())
    assert (seen.start_s, seen.steps[0].output, seen.steps[0].keep, seen.steps[0].path) == (1.5, 1, False, ((1, 2),))
    assert next(mooncake.Prefills(trace, cached=False).sessions()).steps[0].path == ()


def test_a_burst_can_be_spread_until_the_next() -> None:
    trace = sent(*((start, 20, ()) for start in (0.0, 0.0, 0.0, 3.0, 3.0)))
    seen = mooncake.Prefills(trace, speed=2.0, spread=True).sessions()
    assert [session.start_s for session in seen] == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.25])


def test_every_policy_runs_and_speed_is_the_inverse_of_slowness() -> None:
    trace = sent(*((0.4 * i, 3000, ((i % 3, 180),)) for i in range(30)))
    by_policy = {p: mooncake.serve(trace, mooncake.Setup(instances=2), p) for p in mooncake.POLICIES}
    assert by_policy["kv_centric"].hit >= by_policy["random"].hit
    assert all(0 < outcome.busy <= 1 for outcome in by_policy.values())
    with pytest.raises(ForgeError, match="policy = 'best'"):
        mooncake.serve(trace, mooncake.Setup(), "best")
    faster = mooncake.serve(trace, mooncake.Setup(instances=2, speed=2.0, slowness=0.5), "least_loaded")
    assert faster.ttft_s == pytest.approx(by_policy["least_loaded"].ttft_s / 2, rel=1e-6)


def test_the_closest_speed_is_judged_by_its_worst_policy() -> None:
    exact = dict(mooncake.PUBLISHED_TTFT_S)
    one_off = exact | {"random": exact["random"] * 1.3}
    all_off = {policy: value * 1.2 for policy, value in exact.items()}
    assert mooncake.closest({1.0: one_off, 2.0: all_off}) == 2.0
    assert mooncake.within(all_off)
    assert not mooncake.within(one_off)
    assert mooncake.errors(one_off)["random"] == pytest.approx(0.3)
    with pytest.raises(ForgeError, match="speed = 0"):
        mooncake.Setup(speed=0)
