"""What every dispatcher must do, and what each of ours promises beyond that."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import World, scenario, trace_of

from forge import trace as ev
from forge.mix import Mix
from forge.policies import AnyDispatch, Mixed, Paced, ReplaceDead, Staged
from forge.types import ForgeError
from forge.views import AdmissionView, DispatchView, DomainView

DISPATCHES = get_args(get_args(AnyDispatch)[0])


def view(**over: Any) -> DispatchView:
    values = {
        "now": 0.0,
        "draw": 0.5,
        "submitted": 0,
        "running": 0,
        "concurrency": 16,
        "in_flight": 0,
        "unanswered": 0,
        "instances": 2,
        "domains": (DomainView("a", 2.0), DomainView("b", 1.0)),
    }
    return DispatchView(**(values | over))


def admission(in_flight: int, instances: int = 2) -> AdmissionView:
    return AdmissionView(now=0.0, draw=0.5, trajectory="3.1", turn=2, in_flight=in_flight, instances=instances)


counts = st.integers(0, 50)
domains = st.lists(st.tuples(st.floats(0.01, 100), counts, counts, counts, counts), min_size=1, max_size=5).map(
    lambda rows: tuple(DomainView(f"d{i}", *row) for i, row in enumerate(rows))
)
views = st.lists(
    st.tuples(st.floats(0, 60), counts, counts, st.integers(0, 200), st.integers(0, 4), domains),
    min_size=1,
    max_size=20,
)


@pytest.mark.parametrize("cls", DISPATCHES)
@given(rows=views)
def test_it_names_a_domain_of_the_mix_and_never_waits_for_nothing(cls: type[Any], rows: list[Any]) -> None:
    policy, now = cls(), 0.0
    for later, submitted, running, unanswered, instances, mix in rows:
        now += later
        seen = view(
            now=now,
            submitted=submitted,
            running=running,
            concurrency=50,
            unanswered=unanswered,
            instances=instances,
            domains=mix,
        )
        chosen = policy.next(seen)
        assert chosen in {None, *(one.name for one in mix)}
        assert running or chosen is not None


@pytest.mark.parametrize("cls", DISPATCHES)
@given(above=st.integers(1, 20), in_flight=st.integers(0, 100), instances=st.integers(0, 5))
def test_requests_are_refused_from_so_many_in_flight_on_and_never_by_default(
    cls: type[Any], above: int, in_flight: int, instances: int
) -> None:
    assert not cls().refuses
    assert cls().refuse(admission(in_flight, instances)) is None
    policy = cls(refuse_above=above, retry_after_s=0.5)
    assert policy.refuses
    refused = policy.refuse(admission(in_flight, instances))
    assert refused == (0.5 if in_flight >= above * max(1, instances) else None)
    assert in_flight or refused is None


@pytest.mark.parametrize(
    ("cls", "values", "says"),
    [
        (Mixed, {"refuse_above": -1}, "refuse_above = -1: must be at least 0"),
        (Mixed, {"retry_after_s": 0.0}, "retry_after_s = 0: must be seconds in"),
        (Mixed, {"retry_after_s": 61.0}, "retry_after_s = 61: must be seconds in"),
        (Staged, {"round_items": 0}, "round_items = 0: must be at least 1"),
        (Paced, {"fewest": 0}, "fewest = 0: must be at least 1"),
        (Paced, {"step": 0}, "step = 0: must be at least 1"),
        (Paced, {"unanswered": -1.0}, "unanswered = -1.0: must be at least 0"),
        (Paced, {"settle_s": -1.0}, "settle_s = -1.0: must be at least 0"),
        (Paced, {"cut": 1.0}, "cut = 1: must lie between 0 and 1"),
    ],
)
def test_impossible_values_are_named(cls: type[Any], values: dict[str, Any], says: str) -> None:
    with pytest.raises(ForgeError, match=says):
        cls(**values)


def test_the_mix_is_that_of_positions_whatever_became_of_items() -> None:
    events = trace_of(scenario(), crashes=(12.0, 20.0))
    submitted = {e.position: e.domain for e in events if isinstance(e, ev.Submitted)}
    mix = Mix(scenario().mix())
    assert submitted == {position: mix.domain(position) for position in submitted}
    assert len(submitted) > 20


def test_an_item_is_submitted_as_the_call_before_it_said() -> None:
    events = trace_of(scenario(policy={"dispatch": {"kind": "replace_dead"}}))
    pairs = [(a, b) for a, b in pairwise(events) if isinstance(b, ev.Submitted)]
    assert all(isinstance(a, ev.PolicyCall) and (a.slot, a.method) == ("dispatch", "next") for a, _ in pairs)
    assert [a.decision for a, _ in pairs if isinstance(a, ev.PolicyCall)] == [b.domain for _, b in pairs]


@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), size=st.integers(1, 200))
def test_stages_follow_one_another_and_keep_the_shares(weights: list[float], size: int) -> None:
    mix = tuple(DomainView(f"d{i}", weight) for i, weight in enumerate(weights))
    policy = Staged(round_items=size)
    chosen = [policy.next(view(submitted=j, domains=mix)) for j in range(2 * size)]
    assert chosen[:size] == chosen[size:] == sorted(chosen[:size])
    for one in mix:
        assert abs(chosen[:size].count(one.name) - size * one.weight / sum(weights)) <= 1


def test_a_domain_whose_items_die_is_submitted_more_often() -> None:
    def alive(policy: Any) -> dict[str, int]:
        mix = (DomainView("a", 1.0), DomainView("b", 1.0))
        for j in range(400):
            name = policy.next(view(submitted=j, domains=mix))
            domain = next(one for one in mix if one.name == name)
            domain.submitted += 1
            domain.dead += name == "b" and domain.submitted % 2
        return {one.name: one.submitted - one.dead for one in mix}

    held, drifting = alive(ReplaceDead()), alive(Mixed())
    assert abs(held["a"] - held["b"]) <= 1
    assert drifting == {"a": 200, "b": 100}


def test_pace_grows_while_answers_come_promptly_and_shrinks_when_they_do_not() -> None:
    policy, running, now = Paced(fewest=3, step=2, cut=0.5, unanswered=1.0, settle_s=5.0), 0, 0.0

    def fill(unanswered: int, seconds: float) -> int:
        nonlocal running, now
        until = now + seconds
        while now < until:
            running = min(running, 1)  # the others have ended
            while running < 16 and policy.next(view(now=now, running=running, unanswered=unanswered)) is not None:
                running += 1
            now += 1.0
        return running

    assert fill(0, 1.0) == 3
    assert fill(0, 100.0) == 16  # its limit is C by now
    assert fill(3, 4.0) == 8  # once, not for every question
    assert fill(3, 100.0) == 3


def test_counts_by_domain_are_those_of_the_queue() -> None:
    def check(_: ev.Event) -> None:
        states = Counter(state.value for state in world.control.queue.states)
        mine = world.control.views.domains.values()
        assert sum(one.running for one in mine) == states["running"]
        assert sum(one.finished for one in mine) == states["finished"]
        assert all(one.submitted >= one.running + one.finished + one.dead for one in mine)

    world = World(scenario(), sinks=(check,), crashes=(5.0,), death_rate=0.3)
    world.run()
    assert sum(one.dead for one in world.control.views.domains.values()) > 0


def test_refused_requests_are_asked_again_and_never_routed_above_the_limit() -> None:
    given_scenario = scenario(policy={"dispatch": {"kind": "mix", "refuse_above": 2, "retry_after_s": 0.2}})
    free = max(in_flight(trace_of(replace_dispatch(given_scenario, refuse_above=0))))
    events = trace_of(given_scenario)
    assert free > 4 >= max(in_flight(events))
    refused = [e for e in events if isinstance(e, ev.Refused)]
    assert refused
    assert {e.retry_s for e in refused} == {0.2}
    ends = Counter(e.position for e in events if isinstance(e, ev.Finished | ev.Dead))
    assert set(ends.values()) == {1}
    assert isinstance(events[-1], ev.RunEnded)


def replace_dispatch(given_scenario: Any, **values: Any) -> Any:
    policy = replace(given_scenario.policy, dispatch=replace(given_scenario.policy.dispatch, **values))
    return given_scenario.model_copy(update={"policy": policy})


def in_flight(events: list[ev.Event]) -> list[int]:
    now: set[str] = set()
    counts = []
    for event in events:
        if isinstance(event, ev.Routed):
            now.add(event.request)
        elif isinstance(event, ev.Completed):
            now.discard(event.request)
        counts.append(len(now))
    return counts
