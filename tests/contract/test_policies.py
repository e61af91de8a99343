"""What every policy of a slot must do, whoever wrote it: run against each class of the slot's union."""

from __future__ import annotations

import copy
import random
import tomllib
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import scenario, trace_of

from forge import trace as ev
from forge.instances import InstanceView, RouterView
from forge.policies import (
    AdaptiveWindow,
    AnyDispatch,
    AnyKv,
    AnyPlacement,
    AnyRouter,
    AnyScheduler,
    AnySpeculation,
    AnySync,
    CacheAware,
    EveryK,
    Parking,
    Policies,
)
from forge.policies.router_published import KvCentric, PrefixAffinity
from forge.policies.sync import SyncMode
from forge.queue import ItemQueue, QueueShape
from forge.scenario import Scenario, parse, policy_toml, resolved
from forge.types import ForgeError, ItemState
from forge.views import ItemView, QueueView, SyncView

SCHEDULERS = get_args(get_args(AnyScheduler)[0])
ROUTERS = get_args(get_args(AnyRouter)[0])
SYNCS = (AnySync,)
RETENTIONS = get_args(get_args(AnyKv)[0])
PLACEMENTS = get_args(get_args(AnyPlacement)[0])
SPECULATIONS = get_args(get_args(AnySpeculation)[0])
DISPATCHES = get_args(get_args(AnyDispatch)[0])
MODES: tuple[SyncMode, ...] = get_args(SyncMode)
SLOTS = {
    "scheduler": SCHEDULERS,
    "router": ROUTERS,
    "sync": SYNCS,
    "placement": PLACEMENTS,
    "speculation": SPECULATIONS,
    "kv": RETENTIONS,
    "dispatch": DISPATCHES,
}
EVERY = [(slot, cls) for slot, classes in SLOTS.items() for cls in classes]


def with_policy(slot: str, kind: str) -> Scenario:
    return scenario(policy={slot: {"kind": kind}})


@pytest.mark.parametrize(("slot", "cls"), EVERY)
class TestEveryPolicy:
    def test_is_its_own_configuration(self, slot: str, cls: type[Any]) -> None:
        policy = cls()
        with pytest.raises(TypeError):
            cls(policy.kind)  # keyword-only
        given_scenario = with_policy(slot, policy.kind)
        assert type(given_scenario.policy.slots()[slot]) is cls
        assert parse(resolved(given_scenario), "again") == given_scenario

    def test_its_file_is_read_back(self, slot: str, cls: type[Any]) -> None:
        given_scenario = with_policy(slot, cls().kind)
        written = tomllib.loads(policy_toml(given_scenario.policy))
        assert scenario(policy=written).policy == given_scenario.policy

    def test_an_unknown_kind_is_told_which_there_are(self, slot: str, cls: type[Any]) -> None:
        with pytest.raises(ValueError, match=rf"policy\.{slot}\.kind = 'nosuch': must be .*{cls().kind}"):
            scenario(policy={slot: {"kind": "nosuch"}})

    def test_a_table_without_a_kind_is_of_the_default_one(self, slot: str, cls: type[Any]) -> None:  # noqa: ARG002
        assert scenario(policy={slot: {}}).policy == Policies()

    def test_refuses_unknown_keys_by_their_path(self, slot: str, cls: type[Any]) -> None:
        with pytest.raises(ValueError, match=rf"policy\.{slot}\.surprise: unknown key"):
            scenario(policy={slot: {"kind": cls().kind, "surprise": 1}})

    def test_runs_a_world_to_its_end_and_decides_the_same_again(self, slot: str, cls: type[Any]) -> None:
        given_scenario = with_policy(slot, cls().kind)
        events = trace_of(given_scenario)
        assert isinstance(events[-1], ev.RunEnded)
        assert [ev.encode(e) for e in events] == [ev.encode(e) for e in trace_of(given_scenario)]

    def test_changes_its_state_only_through_its_own_methods(self, slot: str, cls: type[Any]) -> None:
        given_scenario = with_policy(slot, cls().kind)
        before = repr(given_scenario), copy.deepcopy(vars(given_scenario.policy.slots()[slot]))
        trace_of(given_scenario)
        assert (repr(given_scenario), vars(given_scenario.policy.slots()[slot])) == before

    def test_every_key_has_a_default(self, slot: str, cls: type[Any]) -> None:
        assert all(hasattr(cls(), f.name) for f in fields(cls))
        assert slot in Policies().slots()


# --- schedulers ------

moves = st.lists(
    st.tuples(st.sampled_from(["submit", "finish", "die", "take", "train"]), st.integers(0, 30)), max_size=80
)


def view_of(queue: ItemQueue, order: list[int], draw: float) -> QueueView:
    finished_s = {p: float(i) for i, p in enumerate(order)}
    waiting = tuple(
        ItemView(
            position=p,
            finished=queue.states[p] is ItemState.FINISHED,
            domain="x",
            submitted_s=float(p),
            finished_s=finished_s.get(p),
        )
        for p in queue.waiting()
    )
    shape, forming = queue.shape, len(queue.forming)
    return QueueView(
        now=9.0,
        draw=draw,
        n=shape.n,
        batch=shape.batch,
        head=queue.head,
        forming=forming,
        training=len(queue.training),
        submitted=len(queue),
        parked=sum(i.position < queue.head for i in waiting),
        waiting=waiting,
        finished=tuple(i for i in waiting if i.finished),
    )


@pytest.mark.parametrize("cls", SCHEDULERS)
@given(n=st.integers(1, 12), batch=st.integers(1, 4), moves=moves, draw=st.floats(0, 1, exclude_max=True))
def test_a_pick_is_legal_and_waiting_means_nothing_is_visible(
    cls: type[Any], n: int, batch: int, moves: list[tuple[str, int]], draw: float
) -> None:
    policy = cls()
    window = policy.window(n)
    assert window is None or 1 <= window <= n
    assert window == cls().window(n), "constant"
    queue = ItemQueue(QueueShape(n=n, batch=min(batch, n), window=window))
    order: list[int] = []
    for name, which in moves:
        waiting = queue.waiting()
        chosen = waiting[which % len(waiting)] if waiting else None
        if name == "submit" and queue.may_submit():
            queue.submit()
        elif name == "finish" and chosen is not None and queue.states[chosen] is ItemState.RUNNING:
            queue.finish(chosen)
            order.append(chosen)
        elif name == "die" and chosen is not None:
            queue.die(chosen)
        elif name == "train" and len(queue.forming) == queue.shape.batch:
            queue.start_step()
            queue.commit()
            queue.publish(len(queue.committed))
        elif name == "take" and len(queue.forming) < queue.shape.batch:
            picked = policy.pick(view_of(queue, order, draw))
            if picked is None:
                visible = [p for p in queue.finished_order if queue.is_visible(p)]
                batch = queue.shape.batch - len(queue.forming) if cls is AdaptiveWindow else 1
                assert len(visible) < batch, "waits although it could take"
                assert queue.head not in visible
            else:
                queue.take(picked)  # raises QueueError where the queue would not let it go


def test_what_tells_the_schedulers_apart() -> None:
    queue = ItemQueue(QueueShape(n=10, batch=4, window=None))
    for _ in range(10):
        queue.submit()
    order = [9, 4, 2, 1]
    for position in order:
        queue.finish(position)
    view = view_of(queue, order, 0.0)
    picks = {cls().kind: cls().pick(view) for cls in SCHEDULERS}
    assert picks == {"strict_fifo": None, "windowed_fifo": 1, "greedy": 1, "fffo": 9, "adaptive_window": 1}
    head = (replace(view.waiting[0], finished=True, finished_s=50.0),)
    head_done = replace(view, waiting=head, finished=head)
    assert {cls().pick(head_done) for cls in SCHEDULERS} == {0}


PARKING = [cls for cls in SCHEDULERS if isinstance(cls(), Parking)]


@pytest.mark.parametrize("cls", PARKING)
def test_a_head_is_parked_once_it_is_due_and_holds_something_up(cls: type[Any]) -> None:
    policy = cls(park_items=1, park_after_s=5.0, park_reach=3)
    queue = ItemQueue(QueueShape(n=6, batch=2, window=1, park_items=2, park_reach=3))
    for _ in range(4):
        queue.submit()
    queue.park(0)
    assert policy.park(replace(view_of(queue, [], 0.0), now=99.0)) is None, "nothing is held up"
    queue.finish(3)
    late, early = (replace(view_of(queue, [3], 0.0), now=now) for now in (6.0, 5.9))
    assert (policy.park(early), policy.park(late)) == (None, 1), "5 s after its submission at 1 s"
    full = ItemQueue(QueueShape(n=2, batch=1, window=2, park_items=1, park_reach=3))
    full.submit()
    full.submit()
    assert policy.park(replace(view_of(full, [], 0.0), now=99.0)) == 0, "it holds up submissions"
    with pytest.raises(ForgeError, match="park_reach = 0: must be at least 1"):
        cls(park_items=1)
    with pytest.raises(ForgeError, match="park_after_s = -1"):
        cls(park_after_s=-1.0)
    with pytest.raises(ForgeError, match="park_items = -1"):
        cls(park_items=-1)


def seen_by_adaptive(finished: list[int], forming: int, training: int) -> QueueView:
    """Of 8 running positions, of which some have finished; a batch is 4."""
    queue = ItemQueue(QueueShape(n=8, batch=4, window=8))
    for _ in range(8):
        queue.submit()
    for position in finished:
        queue.finish(position)
    return replace(view_of(queue, finished, 0.0), forming=forming, training=training)


def test_the_adaptive_window_opens_for_a_waiting_trainer_and_a_whole_batch() -> None:
    policy = AdaptiveWindow(lag_budget=11)
    assert policy.window(8) == 5, "L - N + 2"
    assert policy.pick(seen_by_adaptive([1, 2, 3, 4], 0, 0)) == 1
    assert policy.pick(seen_by_adaptive([1, 2, 3, 4], 0, 4)) is None, "the trainer works"
    assert policy.pick(seen_by_adaptive([1, 2, 3], 0, 0)) is None, "less than a batch"
    assert policy.pick(seen_by_adaptive([1, 2, 3], 1, 0)) == 1, "with the one that was taken it is a batch"
    assert policy.pick(seen_by_adaptive([1, 2, 3, 5], 0, 0)) is None, "one is beyond the budget"
    assert policy.pick(seen_by_adaptive([0, 5], 0, 4)) == 0, "in order at any time"
    assert AdaptiveWindow().window(8) == 8
    assert AdaptiveWindow(lag_budget=99).window(8) == 8
    assert AdaptiveWindow(fraction=0.5).pick(seen_by_adaptive([3], 0, 4)) == 3


def test_a_budget_too_small_for_n_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"lag_budget = 6: queue\.n = 8 makes a lag of 7 items possible"):
        AdaptiveWindow(lag_budget=6).window(8)
    with pytest.raises(ForgeError, match="a lag of 10 items possible"):
        AdaptiveWindow(lag_budget=9, park_items=1, park_reach=3).window(8)
    assert AdaptiveWindow(lag_budget=10, park_items=1, park_reach=3).window(8) == 1
    with pytest.raises(ForgeError, match="lag_budget = -1"):
        AdaptiveWindow(lag_budget=-1)
    with pytest.raises(ForgeError, match="fraction = 2"):
        AdaptiveWindow(fraction=2.0)


# --- routers ------

instances = st.lists(
    st.builds(InstanceView, instance=st.integers(0, 50), in_flight=st.integers(0, 9), version=st.integers(0, 3)),
    min_size=1,
    max_size=8,
    unique_by=lambda i: i.instance,
)


@pytest.mark.parametrize("cls", ROUTERS)
@given(views=st.lists(st.tuples(instances, st.floats(0, 1, exclude_max=True)), min_size=1, max_size=12))
def test_a_route_is_a_live_instance_and_a_pure_function_of_what_was_seen(
    cls: type[Any], views: list[tuple[list[InstanceView], float]]
) -> None:
    one, other = cls(), cls()
    for live, draw in views:
        view = RouterView(now=1.0, draw=draw, trajectory="0.0", turn=0, prompt_tokens=5, instances=tuple(live))
        chosen = one.route(view)
        assert chosen in {i.instance for i in live}
        assert other.route(copy.deepcopy(view)) == chosen


@pytest.mark.parametrize("cls", [cls for cls in (*ROUTERS, KvCentric) if not cls.reads_load])
@given(live=instances, draw=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 99))
def test_who_does_not_read_the_load_does_not_depend_on_it(
    cls: type[Any], live: list[InstanceView], draw: float, seed: int
) -> None:
    rng = random.Random(seed)
    others = [
        replace(i, running=rng.randrange(9), waiting=rng.randrange(9), free_tokens=rng.randrange(9)) for i in live
    ]
    seen = [
        RouterView(1.0, draw, "0.0", 0, 5, tuple(sorted(one, key=lambda i: i.instance)), {live[0].instance: 3})
        for one in (live, others)
    ]
    assert cls().route(seen[0]) == cls().route(seen[1])


@given(live=instances, cached=st.dictionaries(st.integers(0, 50), st.integers(1, 5)), draw=st.floats(0, 0.99))
def test_cache_aware_takes_the_least_that_is_missing(
    live: list[InstanceView], cached: dict[int, int], draw: float
) -> None:
    live = [replace(one, prefill_tokens=one.version) for one in live]
    chosen = CacheAware().route(RouterView(1.0, draw, "0.0", 0, 5, tuple(live), cached))
    scores = {i.instance: (i.prefill_tokens - cached.get(i.instance, 0), i.in_flight) for i in live}
    best = [i for i in scores if scores[i] == min(scores.values())]
    assert chosen == best[int(draw * len(best))]


@pytest.mark.parametrize("cls", [cls for cls in ROUTERS if cls is not PrefixAffinity])
def test_equal_instances_share_the_load(cls: type[Any]) -> None:
    router = cls()
    live = tuple(InstanceView(instance=i, in_flight=0, version=0) for i in range(4))
    views = [
        RouterView(now=0.0, draw=k / 64, trajectory=f"{k}.0", turn=0, prompt_tokens=1, instances=live)
        for k in range(64)
    ]
    chosen = [router.route(v) for v in views]
    assert {chosen.count(i) for i in range(4)} == {16}


# --- weight sync ------


@pytest.mark.parametrize("cls", SYNCS)
@given(unpublished=st.integers(1, 9), k=st.integers(1, 5), asked=st.sampled_from(MODES), in_flight=st.integers(0, 99))
def test_a_sync_never_waits_longer_than_it_promised(
    cls: type[Any], unpublished: int, k: int, asked: SyncMode, in_flight: int
) -> None:
    policy = cls(k=k, mode=asked)
    view = SyncView(now=0.0, draw=0.0, step=20, version=3, steps_unpublished=unpublished, requests_in_flight=in_flight)
    mode = policy.decide(view)
    assert mode in (None, asked)
    if unpublished >= policy.publish_every:
        assert mode is not None, "the queue's validity needs a publication every publish_every steps"


def test_a_pending_publication_is_not_asked_for_again() -> None:
    """Under a drain the last one may still wait for running requests: k counts from when it was asked for."""
    policy = EveryK(k=2, mode="drain")
    asked = []
    for step in range(1, 7):
        view = SyncView(now=0.0, draw=0.0, step=step, version=0, steps_unpublished=step, requests_in_flight=1)
        asked.append(policy.decide(view))
    assert asked == [None, "drain", None, "drain", None, "drain"]
    resumed = EveryK(k=2)
    view = SyncView(now=0.0, draw=0.0, step=51, version=50, steps_unpublished=1, requests_in_flight=0)
    assert resumed.decide(view) is None
