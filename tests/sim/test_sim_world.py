"""Laws of every simulated run, determinism, common random numbers, crashes, and the order of the schedulers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import pytest
import simpy
from hypothesis import given, settings
from sim_scenarios import build, heavy_tail, scenarios, with_scheduler

from forge import trace as ev
from forge.control import Control
from forge.metrics import LawCheck
from forge.policies import Policies, WindowedFifo
from forge.policies.sync import SyncMode
from forge.queue import ItemQueue
from forge.scenario import Scenario, resolved
from forge.sections import Stop
from forge.types import ForgeError, ItemState
from sim.measure import measure
from sim.rollout import Rollout
from sim.sessions import Step
from sim.workload import Workload
from sim.world import Run, SimError, simulate

E = TypeVar("E", bound=ev.Event)


def of_kind(events: list[ev.Event], kind: type[E]) -> list[E]:
    return [e for e in events if isinstance(e, kind)]


# --- laws ------


@given(scenarios())
@settings(max_examples=100, deadline=None)
def test_laws(scenario: Scenario) -> None:
    try:
        run = simulate(scenario)
    except ForgeError as error:
        if "items died in a row" not in str(error):
            raise
        return
    events, queue = run.events, run.control.queue
    every_item_ends_once(events, queue)
    lag_is_bounded(events, queue)
    every_request_ends_once(events)
    weights_change_as_the_mode_says(events, scenario.policy.sync.mode)
    published = of_kind(events, ev.Published)
    committed = of_kind(events, ev.Committed)
    assert [p.version for p in published] == sorted({p.version for p in published})
    if committed:
        assert published[-1].items == len(queue.committed)
    assert [e.t for e in events] == sorted(e.t for e in events)
    assert isinstance(events[-1], ev.RunEnded)
    laws = LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)
    for event in events:
        laws.apply(event)
    assert laws.violations == []


def every_item_ends_once(events: list[ev.Event], queue: ItemQueue) -> None:
    assert set(queue.states) <= {ItemState.PUBLISHED, ItemState.DEAD}
    ends = Counter(e.position for e in events if isinstance(e, ev.Taken | ev.Dead))
    assert ends == Counter(range(len(queue)))
    members = Counter((e.position, e.member) for e in of_kind(events, ev.MemberDone))
    assert set(members.values()) <= {1}
    assert len(members) == sum(e.members for e in of_kind(events, ev.Submitted))


def lag_is_bounded(events: list[ev.Event], queue: ItemQueue) -> None:
    bound = queue.shape.lag_items_bound
    lags = [e.lag_items for e in of_kind(events, ev.Taken)]
    assert bound is None or max(lags, default=0) <= bound


def every_request_ends_once(events: list[ev.Event]) -> None:
    routed = [e.request for e in of_kind(events, ev.Routed)]
    completed = Counter(e.request for e in of_kind(events, ev.Completed))
    assert len(set(routed)) == len(routed)
    assert set(completed) <= set(routed)
    assert set(completed.values()) <= {1}


def weights_change_as_the_mode_says(events: list[ev.Event], mode: SyncMode) -> None:
    """Within a request only where it is not waited for."""
    for e in of_kind(events, ev.Completed):
        first, last = e.versions
        assert first == last if mode == "drain" else first <= last


# --- determinism ------


def trace_bytes(scenario: Scenario, path: Path) -> bytes:
    writer = ev.TraceWriter(path)
    simulate(scenario, (writer,))
    writer.close()
    return path.read_bytes()


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    scenario = build({"n": 16, "batch": 4, "concurrency": 12, "group": 4}, sim={"instance_mtbf_s": 2.0})
    first = trace_bytes(scenario, tmp_path / "a")
    assert first == trace_bytes(scenario, tmp_path / "b")
    assert first != trace_bytes(scenario.model_copy(update={"seed": 1}), tmp_path / "c")


def test_sinks_change_nothing_but_see_policy_calls() -> None:
    scenario = heavy_tail()
    seen: list[ev.Event] = []
    quiet = simulate(scenario).events
    assert simulate(scenario, (seen.append,)).events == quiet
    assert [e for e in seen if not isinstance(e, ev.PolicyCall)] == quiet
    assert len(seen) > len(quiet)


def test_a_shared_workload_changes_nothing() -> None:
    scenario = heavy_tail()
    workload = Workload(scenario)
    simulate(with_scheduler(scenario, "greedy"), work=workload)
    assert simulate(scenario, work=workload).events == simulate(scenario).events


def test_replayed_on_fresh_policies_and_a_fresh_fold_a_trace_gives_the_same_decisions() -> None:
    scenario = build(
        {"n": 16, "batch": 4, "concurrency": 12, "group": 4}, sim={"instance_mtbf_s": 2.0}, engine={"instances": 3}
    )
    seen: list[ev.Event] = []
    simulate(scenario, (seen.append,))
    replayed: list[ev.Event] = []
    control = Control(
        policies=scenario.policy.fresh(),
        shape=scenario.shape(),
        instances=scenario.engine.instances,
        group=scenario.queue.group,
        seed=scenario.seed,
        mix=scenario.mix(),
        concurrency=scenario.queue.concurrency,
        sinks=(replayed.append,),
    )
    for event in seen:
        if isinstance(event, ev.PolicyCall):
            control._ask(event.t, event.slot, event.method, event.args)
        else:
            control.account(event)
    assert replayed == seen
    assert {e.slot for e in of_kind(seen, ev.PolicyCall)} == {"scheduler", "router", "sync", "dispatch"}


# --- common random numbers ------


def test_two_policies_meet_the_same_work() -> None:
    strict, greedy = (simulate(with_scheduler(heavy_tail(), kind)) for kind in ("strict_fifo", "greedy"))

    def work(run: Run) -> dict[tuple[int, int], tuple[object, ...]]:
        done = of_kind(run.events, ev.MemberDone)
        return {(e.position, e.member): (e.reward, e.turns, e.tokens, e.tool_wait_s) for e in done}

    assert work(strict) == work(greedy)
    assert [e.position for e in of_kind(strict.events, ev.Taken)] != [
        e.position for e in of_kind(greedy.events, ev.Taken)
    ]


def test_a_member_does_the_same_in_a_larger_group() -> None:
    small, large = (Workload(heavy_tail(group=g)) for g in (2, 5))
    for position in range(20):
        assert large.item(position).members[:2] == small.item(position).members


def test_items_share_what_item_share_says() -> None:
    def spread(share: float) -> float:
        sim = {"domains": {"agent": {"tokens_sigma": 1.0, "turns": [1.0], "item_share": share}}}
        work = Workload(build({"n": 8, "batch": 4, "concurrency": 4, "group": 4}, sim=sim))
        items = [work.item(p) for p in range(60)]
        sizes = [{m.steps[0].output for m in item.members} for item in items if item.domain == "agent"]
        return sum(len(s) for s in sizes) / len(sizes)

    assert spread(1.0) == 1.0
    assert spread(0.0) > 3.0


# --- what happens when things break ------


def test_a_crash_sends_requests_again_and_loses_none() -> None:
    scenario = build(
        {"n": 16, "batch": 4, "concurrency": 16, "group": 4},
        sim={"instance_mtbf_s": 1.0, "instance_repair_s": 0.5},
        engine={"instances": 2},
    )
    run = simulate(scenario)
    lost = [e for e in of_kind(run.events, ev.Completed) if e.finish == "lost"]
    assert lost
    assert of_kind(run.events, ev.InstanceUp)
    assert len(of_kind(run.events, ev.Finished)) == 40
    retried = [e for e in of_kind(run.events, ev.Routed) if e.request.endswith(".r1")]
    assert len(retried) >= len({e.request for e in lost if e.request.count(".") == 2})
    assert all(view.in_flight == 0 for view in run.control.views.instances.views())


def test_a_timeout_kills_the_item_and_frees_its_slots() -> None:
    scenario = build(
        {"n": 8, "batch": 2, "concurrency": 8, "group": 2, "item_timeout_s": 0.5},
        tool_wait={"median_s": 0.2, "sigma": 1.5, "cap_s": 50.0},
    )
    run = simulate(scenario)
    dead = of_kind(run.events, ev.Dead)
    assert dead
    assert {d.reason for d in dead} == {"timeout"}
    submitted = {e.position: e.t for e in of_kind(run.events, ev.Submitted)}
    assert all(d.t == pytest.approx(submitted[d.position] + 0.5) for d in dead)


def test_dead_members_make_dead_groups() -> None:
    sim = {"domains": {name: {"death_rate": 0.6} for name in ("agent", "reasoning")}}
    run = simulate(build({"n": 8, "batch": 2, "concurrency": 8, "group": 2}, sim=sim))
    assert {d.reason for d in of_kind(run.events, ev.Dead)} == {"agent_crash"}


def test_a_timeout_kills_members_and_two_survivors_finish_the_item() -> None:
    scenario = build(
        {"n": 8, "batch": 2, "concurrency": 8, "group": 4, "item_timeout_s": 0.6},
        tool_wait={"median_s": 0.2, "sigma": 1.5, "cap_s": 50.0},
    )
    events = simulate(scenario).events
    members: dict[int, list[ev.MemberDone]] = {}
    for done in of_kind(events, ev.MemberDone):
        members.setdefault(done.position, []).append(done)
    survivors = {p: sum(m.reward is not None for m in group) for p, group in members.items()}
    finished = {e.position: e.t for e in of_kind(events, ev.Finished)}
    submitted = {e.position: e.t for e in of_kind(events, ev.Submitted)}
    assert {p for p, count in survivors.items() if count >= 2} == set(finished)
    partial = [p for p in finished if survivors[p] < 4]
    assert partial
    assert all(finished[p] == pytest.approx(submitted[p] + 0.6) for p in partial)
    assert {m.reason for p in partial for m in members[p]} == {None, "timeout"}


def test_a_run_in_which_every_item_dies_is_an_error_that_says_what_to_look_at() -> None:
    sim = {"domains": {name: {"death_rate": 0.999} for name in ("agent", "reasoning")}}
    scenario = build({"n": 4, "batch": 2, "concurrency": 4, "group": 2}, sim=sim)
    scenario = scenario.model_copy(update={"stop": Stop(steps=3)})
    seen: list[ev.Event] = []
    with pytest.raises(
        ForgeError, match="40 items died in a row and none finished, most of them of 'agent_crash': see"
    ):
        simulate(scenario, (seen.append,))
    assert len(of_kind(seen, ev.Dead)) == 40


class Never(WindowedFifo):
    """A scheduler with a fault: it takes nothing."""

    def pick(self, view: object) -> None:  # type: ignore[override]  # noqa: ARG002 - the slot's signature
        return None


@pytest.mark.parametrize("mtbf_s", [None, 3.0])
def test_a_policy_that_waits_for_ever_is_an_error_and_no_hang(mtbf_s: float | None) -> None:
    scenario = build({"n": 8, "batch": 2, "concurrency": 8, "group": 2}, sim={"instance_mtbf_s": mtbf_s})
    stuck = scenario.model_copy(update={"policy": Policies(scheduler=Never())})
    with pytest.raises(SimError, match=r"standstill at .* 8 items are open"):
        simulate(stuck)


def test_arrivals_of_one_instant_join_the_same_iteration() -> None:
    """The second is sent by an event that exists only once the first was sent: the instance must not plan between."""
    scenario = build({"n": 8, "batch": 2, "concurrency": 8, "group": 2})
    seen: list[ev.Event] = []
    control = Control(
        policies=scenario.policy.fresh(), shape=scenario.shape(), instances=1, group=2, seed=0, sinks=(seen.append,)
    )
    env = simpy.Environment()
    rollout = Rollout(env, control, scenario, lambda: None)

    def sender() -> Any:
        yield env.timeout(5)
        for name in ("a", "b"):
            rollout.send(name, 0, 0, 0, Step(prompt=8, output=3), lambda _: None)
            yield env.timeout(0)

    env.process(sender())
    env.run()
    assert len({e.t for e in of_kind(seen, ev.FirstToken)}) == 1


# --- stops ------


@pytest.mark.parametrize("stop", [{"seconds": 3.0}, {"steps": 3}, {"items": 7}])
def test_a_stop_ends_submission_and_what_is_under_way_is_trained(stop: dict[str, float]) -> None:
    scenario = build({"n": 8, "batch": 4, "concurrency": 6, "group": 2})
    run = simulate(Scenario.model_validate({**resolved(scenario), "stop": stop}))
    submitted, steps = of_kind(run.events, ev.Submitted), of_kind(run.events, ev.StepStarted)
    if "seconds" in stop:
        assert submitted[-1].t < 3.0 < run.events[-1].t < 10.0
    if "items" in stop:
        assert len(submitted) == 7
        assert [s.partial for s in steps] == [False, True]
    if "steps" in stop:
        assert 3 <= len(steps) <= 5
    assert sum(len(s.positions) for s in steps) == len(submitted)


# --- the straggler escape ------

ESCAPE = {"park_items": 2, "park_after_s": 4.0, "park_reach": 12}


def with_stragglers(**config: Any) -> Scenario:
    scenario = heavy_tail(120, n=16, concurrency=12)
    scenario = with_scheduler(scenario, "windowed_fifo", fraction=0.3, **config)
    waits = scenario.domains[0].tool_wait.model_copy(update={"cap_s": 100.0, "sigma": 2.5})
    slow = scenario.domains[0].model_copy(update={"tool_wait": waits})
    return scenario.model_copy(update={"domains": (slow, scenario.domains[1])})


def test_a_head_is_parked_at_the_instant_it_is_due_and_something_waits_behind_it() -> None:
    events = simulate(with_stragglers(**ESCAPE)).events
    submitted = {e.position: e.t for e in of_kind(events, ev.Submitted)}
    waited = [e.t - submitted[e.position] for e in of_kind(events, ev.Parked)]
    assert min(waited) == pytest.approx(4.0, abs=1e-9)
    assert sum(w == pytest.approx(4.0, abs=1e-9) for w in waited) > 3, "the timer asks; nothing else happens then"


def test_without_parked_items_nothing_is_asked_and_nothing_changes() -> None:
    seen: list[ev.Event] = []
    simulate(with_stragglers(park_after_s=1.0, park_reach=3), (seen.append,))
    assert {e.method for e in of_kind(seen, ev.PolicyCall) if e.slot == "scheduler"} == {"pick"}
    assert [e for e in seen if not isinstance(e, ev.PolicyCall)] == simulate(with_stragglers()).events


def test_what_dies_stale_stops_its_members_and_every_item_ends_once() -> None:
    run = simulate(with_stragglers(**ESCAPE))
    every_item_ends_once(run.events, run.control.queue)
    every_request_ends_once(run.events)
    stale = {e.position: e.t for e in of_kind(run.events, ev.Dead) if e.reason == "stale"}
    parked = {e.position: e.t for e in of_kind(run.events, ev.Parked)}
    taken = {e.position for e in of_kind(run.events, ev.Taken)}
    assert stale
    assert set(stale) < set(parked)
    assert set(parked) - set(stale) <= taken
    assert set(parked) & taken, "some finish in time"
    stopped = [e for e in of_kind(run.events, ev.MemberDone) if e.reason == "stale"]
    assert {(e.position, e.t) for e in stopped} <= set(stale.items())
    assert not [e for e in of_kind(run.events, ev.Routed) if e.t > stale.get(e.position, e.t)]


def test_the_escape_bounds_what_a_straggler_holds_up() -> None:
    """The longest time without a step, up to the last submission, while items take up to 100 s."""

    def longest_wait(scenario: Scenario) -> float:
        events = simulate(scenario).events
        last = of_kind(events, ev.Submitted)[-1].t
        times = [0.0, *(e.t for e in of_kind(events, ev.StepStarted) if e.t < last), last]
        return max(b - a for a, b in pairwise(times))

    assert longest_wait(with_stragglers()) > 60.0
    assert longest_wait(with_stragglers(**{**ESCAPE, "park_items": 6})) == pytest.approx(4.0), "park_after_s"


# --- what it is for ------


@pytest.mark.parametrize("concurrency", [6, 12])
def test_an_adaptive_window_is_as_fast_as_the_widest_and_takes_fewer_out_of_order(concurrency: int) -> None:
    def run_of(kind: str, **config: Any) -> tuple[float, int]:
        scenario = with_scheduler(heavy_tail(concurrency=concurrency), kind, **config)
        events = simulate(scenario).events
        taken = [e.position for e in of_kind(events, ev.Taken)]
        return measure(events, scenario)["trained_tokens_per_s"], sum(b < a for a, b in pairwise(taken))

    widest, adaptive = run_of("greedy"), run_of("adaptive_window")
    assert adaptive[0] > 0.98 * widest[0]
    assert adaptive[1] < widest[1]
    narrow = run_of("adaptive_window", lag_budget=11)  # N = 12: strict order
    assert narrow == run_of("strict_fifo")


def test_throughput_and_non_stationarity_rise_with_the_window() -> None:
    def mean_figures(kind: str, **config: float) -> tuple[float, float]:
        scenarios = [heavy_tail().model_copy(update={"seed": seed}) for seed in range(3)]
        runs = [with_scheduler(scenario, kind, **config) for scenario in scenarios]
        figures = [measure(simulate(run).events, run) for run in runs]
        return fmean(f["trained_tokens_per_s"] for f in figures), fmean(f["nonstationarity"] for f in figures)

    strict, windowed, greedy = (
        mean_figures("strict_fifo"),
        mean_figures("windowed_fifo", fraction=0.3),
        mean_figures("greedy"),
    )
    assert strict[0] < windowed[0] < greedy[0]
    assert greedy[0] > 1.08 * strict[0]
    assert greedy[1] > 1.1 * strict[1]


def test_policies_are_fresh_in_every_run() -> None:
    scenario = heavy_tail()
    router = replace(scenario.policy, router=scenario.policy.router)
    assert router.fresh().scheduler == scenario.policy.scheduler
    assert router.fresh().scheduler is not scenario.policy.scheduler
