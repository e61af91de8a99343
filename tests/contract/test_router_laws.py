"""Laws of routers: live instances only, even splits, published formulas said twice, more cached is better."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge.cost import CostModel, Deployment, hardware, model_card
from forge.instances import Instances, InstanceView, RouterView, pairs
from forge.policies import AnyRouter, Dynamo, LeastLoaded, Llmd, PrefixAffinity, RoundRobin, Seconds, Sglang, VllmDp
from forge.policies.router_published import KvCentric
from forge.types import ForgeError

ROUTERS = (*get_args(get_args(AnyRouter)[0]), KvCentric)
PROMPT = 1000

counts = st.integers(0, 60)
tokens = st.integers(0, 5000)
seen = st.builds(
    InstanceView,
    instance=st.just(0),
    in_flight=counts,
    prefill_tokens=tokens,
    prefill_pairs=st.integers(0, 10**7),
    context_tokens=tokens,
    running=counts,
    waiting=counts,
    free_tokens=st.integers(0, 9000),
    capacity_tokens=st.just(9000),
    reported_s=st.sampled_from([0.0, 0.5]),
    other_tokens=tokens,
    other_pairs=st.integers(0, 10**7),
)
fleets = st.lists(seen, min_size=1, max_size=6).map(
    lambda all: tuple(replace(one, instance=3 * i) for i, one in enumerate(all))
)
prefixes = st.dictionaries(st.integers(0, 5).map(lambda i: 3 * i), st.integers(1, PROMPT), max_size=6)
draws = st.floats(0, 1, exclude_max=True)


def view_of(
    fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float = 0.0, now: float = 1.0, name: str = "s"
) -> RouterView:
    return RouterView(now, draw, name, 0, PROMPT, fleet, {i: n for i, n in cached.items() if i < 3 * len(fleet)})


@pytest.mark.parametrize("cls", ROUTERS)
@given(fleet=fleets, cached=prefixes, draw=draws, dead=st.integers(0, 5))
def test_the_dead_are_never_chosen(
    cls: type[Any], fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float, dead: int
) -> None:
    router = cls()
    router.route(view_of(fleet, cached, draw))
    live = tuple(one for i, one in enumerate(fleet) if i != dead) or fleet
    held = {one.instance for one in live}
    after = replace(view_of(live, {}, draw), cached={i: n for i, n in cached.items() if i in held})
    assert router.route(after) in held


@pytest.mark.parametrize("cls", [cls for cls in ROUTERS if cls not in (PrefixAffinity, RoundRobin)])
@given(fleet=fleets)
def test_what_is_equal_is_split_evenly(cls: type[Any], fleet: tuple[InstanceView, ...]) -> None:
    alike = tuple(replace(fleet[0], instance=one.instance) for one in fleet)
    chosen = Counter(cls().route(view_of(alike, {}, (k + 0.5) / len(alike))) for k in range(len(alike)))
    assert set(chosen.values()) == {1}


def test_homes_by_hash_spread() -> None:
    fleet = tuple(InstanceView(i) for i in range(4))
    chosen = Counter(PrefixAffinity().route(view_of(fleet, {}, name=f"{k}.0")) for k in range(4000))
    assert min(chosen.values()) > 850
    fewer = fleet[:3]
    moved = [
        k
        for k in range(400)
        if PrefixAffinity().route(view_of(fleet, {}, name=f"{k}.0")) != 3
        and PrefixAffinity().route(view_of(fleet, {}, name=f"{k}.0"))
        != PrefixAffinity().route(view_of(fewer, {}, name=f"{k}.0"))
    ]
    assert not moved, "only the sessions of the instance that went have another home"


@pytest.mark.parametrize("cls", [LeastLoaded, Sglang, Seconds, KvCentric])
@given(loads=st.lists(counts, min_size=1, max_size=6), draw=draws)
def test_equal_signals_leave_the_least_loaded(cls: type[Any], loads: list[int], draw: float) -> None:
    fleet = tuple(InstanceView(i, in_flight=load) for i, load in enumerate(loads))
    assert cls().route(view_of(fleet, {}, draw)) == LeastLoaded().route(view_of(fleet, {}, draw))


# --- published formulas, a second time ------


def best(scores: dict[int, float], draw: float) -> int:
    """Of the least."""
    ties = [i for i, score in scores.items() if score == min(scores.values())]
    return ties[int(draw * len(ties))]


@given(fleet=fleets, cached=prefixes, draw=draws)
def test_sglang_is_its_thresholds(fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float) -> None:
    view = view_of(fleet, cached, draw)
    load = {one.instance: one.in_flight for one in fleet}
    fraction = {i: view.cached.get(i, 0) / PROMPT for i in load}
    unbalanced = max(load.values()) - min(load.values()) > 32 and max(load.values()) > 1.1 * min(load.values())
    if not unbalanced and max(fraction.values()) > 0.5:
        expected = best({i: -share for i, share in fraction.items()}, draw)
    else:
        expected = best({i: float(n) for i, n in load.items()}, draw)
    assert Sglang().route(view) == expected


@given(
    fleet=fleets,
    cached=prefixes,
    draw=draws,
    weights=st.tuples(st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 2.0])),
)
def test_dynamo_is_its_cost(
    fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float, weights: tuple[float, float, float]
) -> None:
    credit, decay, active = weights
    view, scores = view_of(fleet, cached, draw), {}
    for one in fleet:
        excess = (one.prefill_tokens - min(other.prefill_tokens for other in fleet)) / 16
        overlap = view.cached.get(one.instance, 0) / 16 * credit / (1 + decay * excess / (PROMPT / 16))
        blocks = max(0.0, (one.prefill_tokens + PROMPT) / 16 - overlap)
        scores[one.instance] = blocks + one.context_tokens / 16 + active * one.in_flight
    chosen = Dynamo(credit=credit, decay=decay, active_weight=active).route(view)
    assert scores[chosen] == pytest.approx(min(scores.values()), rel=1e-12)


@given(fleet=fleets, cached=prefixes, draw=draws)
def test_llmd_is_its_scorers(fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float) -> None:
    view, scores = view_of(fleet, cached, draw), {}
    queues = [one.waiting for one in fleet]
    for one in fleet:
        spread = max(queues) - min(queues)
        queue = (max(queues) - one.waiting) / spread if spread else 1.0
        scores[one.instance] = (
            3 * view.cached.get(one.instance, 0) / PROMPT + 2 * queue + 2 * one.free_tokens / one.capacity_tokens
        )
    assert scores[Llmd().route(view)] == pytest.approx(max(scores.values()), rel=1e-12)


@given(fleet=fleets, draws=st.lists(draws, min_size=1, max_size=9), clients=st.integers(1, 4))
def test_vllm_counts_what_it_sent_until_the_next_report(
    fleet: tuple[InstanceView, ...], draws: list[float], clients: int
) -> None:
    router, counts = VllmDp(clients=clients), {one.instance: [one.waiting, one.running] for one in fleet}
    for draw in draws:
        chosen = router.route(view_of(fleet, {}, draw))
        assert chosen == best({i: float(4 * waiting + running) for i, (waiting, running) in counts.items()}, draw)
        counts[chosen][0] += clients
    later = tuple(replace(one, reported_s=one.reported_s + 1) for one in fleet)
    chosen = router.route(view_of(later, {}, 0.0))
    assert chosen == best({one.instance: float(4 * one.waiting + one.running) for one in fleet}, 0.0)


# --- ours ------


def made(**options: Any) -> Seconds:
    return Seconds(token_s=1e-4, pair_s=1e-9, **options)


@given(fleet=fleets, cached=prefixes, draw=draws, more=st.integers(1, PROMPT), moves=st.booleans())
def test_more_cached_never_makes_ours_avoid_an_instance(
    fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float, more: int, moves: bool
) -> None:
    options = {"transfer_token_s": 1e-6} if moves else {}
    view = view_of(fleet, cached, draw)
    chosen = made(**options).route(view)
    longer = max(view.cached.get(chosen, 0), more)
    assert made(**options).route(replace(view, cached=view.cached | {chosen: longer})) == chosen


@given(fleet=fleets, cached=prefixes, draw=draws)
def test_a_single_request_costs_queue_and_prefill(
    fleet: tuple[InstanceView, ...], cached: dict[int, int], draw: float
) -> None:
    """Of a first request, when nothing is learnt: reports are believed by half, see `Foreign`."""
    view = view_of(fleet, cached, draw)

    def cost(one: InstanceView) -> float:
        missing = max(1, PROMPT - view.cached.get(one.instance, 0))
        work = (one.prefill_tokens + one.other_tokens / 2 + missing) * 1e-4
        return work + (one.prefill_pairs + one.other_pairs / 2 + pairs(missing, PROMPT)) * 1e-9

    scores = {one.instance: cost(one) for one in fleet}
    assert scores[made().route(view)] == pytest.approx(min(scores.values()), rel=1e-12)


def test_a_prefix_is_fetched_where_that_is_sooner() -> None:
    fleet = (InstanceView(0, prefill_tokens=10**6), InstanceView(1))
    view = view_of(fleet, {0: 800})
    quick, slow = made(transfer_token_s=1e-6), made(transfer_token_s=1.0)
    assert (quick.route(view), quick.source(view, 1)) == (1, 0)
    assert (slow.route(view), slow.source(view, 1)) == (1, None)
    assert (made().route(view), made().source(view, 1)) == (1, None)


def test_agents_with_nothing_in_flight_have_a_home() -> None:
    router, fleet = made(), tuple(InstanceView(i) for i in range(4))
    first = {k: router.route(view_of(fleet, {}, draw=k / 40, now=float(k), name=f"{k}")) for k in range(40)}
    again = {k: router.route(view_of(fleet, {}, draw=0.99, now=100.0 + k, name=f"{k}")) for k in range(40)}
    assert again == first
    assert set(Counter(first.values()).values()) == {10}


def test_routers_in_parallel_come_to_prefer_different_instances() -> None:
    """An instance whose foreign load goes up and down costs what a report may be wrong by."""
    router = made()
    for k in range(200):
        unsteady = InstanceView(0, reported_s=float(k), other_tokens=4000 * (k % 2))
        router.route(view_of((unsteady, InstanceView(3, reported_s=float(k), in_flight=9)), {}, now=float(k)))
    quiet = (InstanceView(0, reported_s=200.0), InstanceView(3, reported_s=200.0, in_flight=9, prefill_tokens=2000))
    assert router.route(view_of(quiet, {}, now=200.0)) == 3


def test_decodes_count_where_the_goal_is_latency() -> None:
    fleet = (InstanceView(0, running=50), InstanceView(3, prefill_tokens=100))
    assert made().route(view_of(fleet, {})) == 0
    assert made(goal="latency").route(view_of(fleet, {})) == 3


def test_its_costs_are_the_deployments() -> None:
    cost = CostModel(Deployment(model=model_card("llama_3_1_70b"), hardware=hardware("h100_sxm"), tp=8))
    ours = Seconds.of(cost, budget=2048, bandwidth=87e9)
    chunk, before = 2048, 40_000
    told = chunk * ours.token_s + pairs(chunk, before + chunk) * ours.pair_s
    assert told == pytest.approx(cost.prefill(chunk, before), rel=0.03)
    assert ours.transfer_token_s == pytest.approx(327_680 / 87e9, rel=1e-3)
    assert Seconds.of(cost).transfer_token_s is None


@pytest.mark.parametrize(
    ("cls", "options", "says"),
    [
        (Sglang, {"balance_rel": 0.5}, "balance_rel = 0.5"),
        (Sglang, {"match": 2.0}, "match = 2"),
        (Dynamo, {"credit": 1.5}, "credit = 1.5"),
        (Dynamo, {"block": 0}, "block = 0"),
        (Llmd, {"kv": -1.0}, "kv = -1"),
        (VllmDp, {"clients": 0}, "clients = 0"),
        (Seconds, {"token_s": 0.0}, "token_s = 0"),
        (Seconds, {"transfer_token_s": -1.0}, "transfer_token_s = -1"),
    ],
)
def test_what_is_out_of_bounds_is_named(cls: type[Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ForgeError, match=says):
        cls(**options)


# --- what views tell ------

moves = st.lists(st.tuples(st.sampled_from(["route", "first", "end", "report"]), st.integers(0, 9)), max_size=60)


@given(moves=moves, late=st.integers(0, 3))
def test_others_load_is_the_report_less_our_own_at_that_time(moves: list[tuple[str, int]], late: int) -> None:
    instances, history, sent = Instances(1), [(0.0, 0, 0)], dict[str, bool]()
    told = False
    for k, (move, which) in enumerate(moves, 1):
        now, seen = float(k), instances.views()[0]
        some = list(sent)[which % len(sent)] if sent else None
        if move == "route":
            instances.routed(str(k), 0, 10 + which, which, now)
            sent[str(k)] = False
        elif move == "first" and some is not None:
            instances.first_token(some, now)
        elif move == "end" and some is not None:
            assert instances.completed(some, now)
            del sent[some]
        elif move == "report":
            at = max(0.0, now - late)
            own = [h for h in history if h[0] <= at][-1] if told else (now, seen.in_flight, seen.prefill_tokens)
            instances.reported(0, at, 7, which, 100, 40, 0)
            told = True
            assert seen.others == max(0, 7 + which - own[1])
            assert seen.other_tokens == (max(0, 40 - own[2]) if seen.others else 0)
        history.append((now, seen.in_flight, seen.prefill_tokens))
    for request in list(sent):
        instances.completed(request, 99.0)
    left = instances.views()[0]
    assert (left.in_flight, left.unanswered, left.prefill_tokens, left.prefill_pairs, left.context_tokens) == (0,) * 5
