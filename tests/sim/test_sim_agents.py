"""Training runs of synthetic agents: laws, replay, prefix hits, merging, and nodes that crash or are slow."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TypeVar

import pytest
from agent_scenarios import agents

from forge import trace as ev
from forge.metrics import LawCheck
from forge.replay import replay
from forge.runs import RunFolder
from forge.types import DeathReason, ForgeError, ItemState
from sim.deploy import slow_nodes
from sim.engine import Instance
from sim.iteration import LineTimes, SlowTimes
from sim.machines import machines
from sim.request import Request
from sim.workload import work_of
from sim.world import Run, simulate

E = TypeVar("E", bound=ev.Event)
FAULTS = {"instance_mtbf_s": 60.0, "instance_repair_s": 10.0, "slow_nodes": 0.3, "slow_factor": 2.0}


def of_kind(run: Run, kind: type[E]) -> list[E]:
    return [e for e in run.events if isinstance(e, kind)]


@pytest.fixture(scope="module", params=["in_flight", "drain", "abort"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, RunFolder]:
    """Everything at once; the folder's trace has every event and policy call."""
    scenario = agents(policy={"sync": {"mode": request.param}}, sim=FAULTS)
    folder = RunFolder.create(tmp_path_factory.mktemp("runs"), scenario)
    writer = ev.TraceWriter(folder.trace)
    try:
        made = simulate(scenario, (writer,))
    finally:
        writer.close()
    return made, folder


def test_the_laws_of_the_queue_hold(run: tuple[Run, RunFolder]) -> None:
    made, _ = run
    scenario = made.scenario
    laws = LawCheck(scenario.shape(), scenario.queue.concurrency, scenario.engine.instances)
    for event in made.events:
        laws.apply(event)
    assert laws.violations == []
    assert of_kind(made, ev.RunEnded)[-1].reason == "done"


def test_every_item_and_every_request_ends_once(run: tuple[Run, RunFolder]) -> None:
    made, _ = run
    ends = Counter(e.position for e in made.events if isinstance(e, ev.Finished | ev.Dead))
    assert ends == Counter(e.position for e in of_kind(made, ev.Submitted))
    assert set(made.control.queue.states) <= {ItemState.PUBLISHED, ItemState.DEAD}
    members = Counter((e.position, e.member) for e in of_kind(made, ev.MemberDone))
    assert set(members.values()) == {1}
    assert len(members) == 4 * len(ends)
    routed = [e.request for e in of_kind(made, ev.Routed)]
    assert sorted(routed) == sorted(e.request for e in of_kind(made, ev.Completed))
    assert len(set(routed)) == len(routed)


def test_a_run_folder_replays(run: tuple[Run, RunFolder]) -> None:
    made, folder = run
    result = replay(folder)
    assert result.difference is None
    assert result.ended
    assert result.calls > len(of_kind(made, ev.Routed))


def test_everything_happened(run: tuple[Run, RunFolder]) -> None:
    """What these scenarios are for: without it the tests above show little."""
    made, _ = run
    assert of_kind(made, ev.InstanceDown)
    assert of_kind(made, ev.Reported)
    assert len(of_kind(made, ev.Loaded)) > 5
    assert any(e.finish == "lost" for e in of_kind(made, ev.Completed))
    reasons = {e.reason for e in of_kind(made, ev.MemberDone)}
    assert {DeathReason.AGENT_CRASH.value, DeathReason.ENVIRONMENT.value, None} <= reasons
    work = work_of(made.scenario)
    steps = [step for p in range(40) for member in work.item(p).members for step in member.steps]
    assert any(len(step.after) > 1 for step in steps), "a call that waits for sub-agents"
    assert any(not step.keep and step.after for step in steps), "a context that was rewritten, or an end"


def test_members_do_what_was_drawn_for_them(run: tuple[Run, RunFolder]) -> None:
    """Tokens and turns of all that ended by themselves, whatever crashed on the way."""
    made, _ = run
    work = work_of(made.scenario)
    done = [e for e in of_kind(made, ev.MemberDone) if e.reason != DeathReason.TIMEOUT.value]
    assert len(done) > 100
    for event in done:
        member = work.item(event.position).members[event.member]
        assert event.turns == len(member.steps)
        assert event.tokens == sum(step.output for step in member.steps)
        assert event.tool_wait_s == pytest.approx(sum(step.delay_s for step in member.steps))


def test_agents_end_where_the_engines_context_does() -> None:
    """They believe in 9000 tokens and get 4000: no request exceeds that, and some agents die of it."""
    scenario = agents(engine={"max_context": 4000}, agent={"failures": {"hang": 0.0}}, queue={"item_timeout_s": 1e6})
    events = simulate(scenario).events
    sampled = {e.request: e.tokens for e in events if isinstance(e, ev.Completed)}
    sizes = [e.prompt_tokens + sampled[e.request] for e in events if isinstance(e, ev.Routed)]
    assert max(sizes) == 4000
    reasons = Counter(e.reason for e in events if isinstance(e, ev.MemberDone))
    assert set(reasons) == {None, DeathReason.ENVIRONMENT.value}
    assert reasons[DeathReason.ENVIRONMENT.value] > 10


def test_a_first_prompt_beyond_the_engines_context_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"max_context = 3500: agents of sim.agents.coder .* a prompt of 3500 tok"):
        agents(engine={"max_context": 3500})
    assert agents(engine={"max_context": 3501}).engine.max_context == 3501


def test_prompt_tokens_are_found_or_computed(run: tuple[Run, RunFolder]) -> None:
    """Once each where nobody is preempted, crashes or computes anew."""
    calm = simulate(agents(items=10, deployment={"kv_tokens": 400_000}, queue={"item_timeout_s": 1e6}))
    last = of_kind(calm, ev.Usage)[-1]
    prompts = sum(e.prompt_tokens for e in of_kind(calm, ev.Routed))
    assert sum(last.cached_tokens) + sum(last.prefill_tokens) == prompts
    assert all(0 < found < prompts for found in last.cached_tokens)
    made, _ = run
    assert sum(of_kind(made, ev.Usage)[-1].cached_tokens) > 0


def test_prefixes_are_found(run: tuple[Run, RunFolder]) -> None:
    """Of a conversation's prompts all but the new tool result was there before; weights loads and crashes cost some."""
    made, _ = run
    prompts = sum(e.prompt_tokens for e in of_kind(made, ev.Routed))
    prefilled = sum(of_kind(made, ev.Usage)[-1].prefill_tokens)
    assert 0.05 * prompts < prefilled < 0.6 * prompts


def test_merging_trains_fewer_tokens() -> None:
    """Members share a system prompt and a task: a tenth to a fifth of what these agents read and write."""
    merged, flat = (
        simulate(agents(items=16, train={"merge": merge}, policy={"scheduler": {"kind": "strict_fifo"}}))
        for merge in ("tree", "none")
    )
    tokens = [{e.step: e.tokens for e in of_kind(run, ev.Committed)} for run in (merged, flat)]
    assert tokens[0].keys() == tokens[1].keys()
    assert all(tokens[0][step] < 0.95 * tokens[1][step] for step in tokens[0])


def test_a_run_is_its_seed() -> None:
    assert simulate(agents(items=8, sim=FAULTS)).events == simulate(agents(items=8, sim=FAULTS)).events
    assert simulate(agents(items=8, seed=1)).events != simulate(agents(items=8)).events


# --- slow nodes ------


def test_slow_nodes_are_a_share_rounded_up_and_a_larger_share_includes_a_smaller_ones() -> None:
    found = [slow_nodes(agents(instances=8, sim={"slow_nodes": share})) for share in (0.0, 0.01, 0.25, 0.5, 1.0)]
    assert [len(nodes) for nodes in found] == [0, 1, 2, 4, 8]
    assert all(a < b for a, b in pairwise(found))
    others = {slow_nodes(agents(instances=8, seed=seed, sim={"slow_nodes": 0.01})) for seed in range(20)}
    assert len(others) > 3


def test_iterations_of_a_slow_node_take_as_many_times_as_long() -> None:
    times = LineTimes(step_s=2e-3, row_s=1e-4, prefill_token_s=1e-5)
    slow = SlowTimes(times, 2.5)
    assert slow.line(3) == (int(2.5 * times.line(3)[0]), 0, 1)
    assert slow.mixed(3, 100, [(7, 0)]) == 2.5 * times.mixed(3, 100, [(7, 0)])

    scenario = agents(sim={"slow_nodes": 0.3, "slow_factor": 2.5})
    (slow_one,) = slow_nodes(scenario)
    spans = [alone(instance) for instance in machines(scenario).instances]
    usual = spans[(slow_one + 1) % 3]
    assert spans[slow_one] == pytest.approx(2.5 * usual, rel=1e-9)
    assert spans.count(usual) == 2


def test_a_router_that_sees_load_spares_a_slow_node() -> None:
    """Round robin gives each a third; the least loaded is the slow one less often."""
    sim = {"slow_nodes": 0.3, "slow_factor": 4.0}
    shares = {}
    for kind in ("round_robin", "least_loaded"):
        run = simulate(agents(items=16, policy={"router": {"kind": kind}}, sim=sim))
        (slow,) = slow_nodes(run.scenario)
        sent = Counter(e.instance for e in of_kind(run, ev.Routed))
        shares[kind] = sent[slow] / sent.total()
    assert shares["round_robin"] == pytest.approx(1 / 3, abs=0.01)
    assert shares["least_loaded"] < 0.29


def alone(instance: Instance) -> int:
    """Femtoseconds of one request on an idle instance."""
    instance.add(Request("r", 1000, 50), 0)
    now = 0
    while (due := instance.due()) is not None:
        now = due
        instance.advance(now)
    return now
