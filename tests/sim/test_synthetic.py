"""Synthetic agents: the laws of sessions, common random numbers, what the parameters say, caps and failures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forge.sections_agents import AgentDomain, Context, Failures, Spread, SubAgents
from forge.types import DeathReason, ForgeError
from sim.laws import Law
from sim.synthetic import Agents
from sim.work import Group, MemberWork

SHORT = Spread(median=200.0, sigma=1.0, cap=2000.0)
FAST = Spread(median=6.0, sigma=0.8, cap=16.0)


def domain(**values: Any) -> AgentDomain:
    """Everything happens often: sub-agents, full contexts, time-outs."""
    common: dict[str, Any] = {
        "calls": FAST,
        "system_tokens": 700,
        "task_tokens": SHORT,
        "output_tokens": Spread(median=150.0, sigma=1.2, tail_share=0.1, cap=4000.0),
        "result_tokens": SHORT,
        "tool_wait": Spread(median=5.0, sigma=1.5, tail_share=0.1, tail_index=1.0, cap=500.0),
        "sub_agents": SubAgents(rate=0.2, most=3, calls=Spread(median=2.0, cap=5.0), system_tokens=300, task_tokens=90),
        "context": Context(limit_tokens=9000, reserve_tokens=900, summary_tokens=300),
        "failures": Failures(crash=0.1, hang=0.05, timeout_s=300.0, kills=0.3),
    }
    return AgentDomain(**{**common, **values})


def members(agents: Agents, items: int) -> list[MemberWork]:
    return [member for index in range(items) for member in agents.item(index).members]


def asked(member: MemberWork) -> list[tuple[int, int, float]]:
    """Its calls, whatever the ids of its chains."""
    return [(step.prompt, step.output, step.delay_s) for step in member.steps]


def check(member: MemberWork, block: int, limit: int) -> None:
    """The laws of `sim.sessions`, and those of one agent."""
    lengths: dict[int, int] = {}
    for i, step in enumerate(member.steps):
        assert step.prompt >= 1
        assert step.output >= 1
        assert step.prompt + step.output <= limit
        assert step.delay_s >= 0
        assert all(0 <= j < i for j in step.after)
        assert bool(step.after) == bool(i)
        assert sum(blocks for _, blocks in step.path) == step.prompt // block, "all full blocks are on chains"
        assert all(blocks > 0 for _, blocks in step.path[:-1])
        for chain, blocks in step.path:
            assert blocks >= lengths.get(chain, 0), "a chain became shorter"
            lengths[chain] = blocks
        if step.keep:
            chain, blocks = step.path[-1]
            lengths[chain] = blocks + (step.prompt + step.output) // block - step.prompt // block
    waited = {j for step in member.steps for j in step.after}
    left = set(range(len(member.steps))) - waited
    if max(left) - min(left):  # sub-agents whose parent's next prompt is refused
        assert member.death is DeathReason.ENVIRONMENT
        assert not member.idle_s
    else:
        assert left == {len(member.steps) - 1}, "everybody is waited for, sub-agents too, but the last"
    assert not member.steps[-1].keep


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    index=st.integers(0, 10**6),
    block=st.sampled_from([1, 16, 64, 1000]),
    kept=st.sampled_from([0, 3000, 5000]),
    rate=st.sampled_from([0.0, 0.3]),
)
def test_members_keep_the_laws(seed: int, index: int, block: int, kept: int, rate: float) -> None:
    model = domain(
        context=Context(limit_tokens=9000, reserve_tokens=900, summary_tokens=300, kept_tokens=kept),
        sub_agents=SubAgents(rate=rate, most=3, calls=FAST, system_tokens=300, task_tokens=90),
    )
    for member in Agents({"d": model}, seed=seed, group=3, block=block).item(index % 50).members:
        check(member, block, 9000)


def test_the_same_seed_gives_the_same_work_in_any_order() -> None:
    domains = {"a": domain(), "b": domain(share=2.0)}
    one, two = Agents(domains, seed=7), Agents(domains, seed=7)
    forth = [one.item(index) for index in range(12)]
    assert forth == [two.item(index) for index in reversed(range(12))][::-1]
    assert forth != [Agents(domains, seed=8).item(index) for index in range(12)]


def test_a_larger_group_and_a_later_death_change_nothing_else() -> None:
    small, large = (Agents({"d": domain()}, seed=3, group=group) for group in (2, 6))
    for index in range(10):
        assert large.item(index).members[:2] == small.item(index).members
    spared = Agents({"d": domain(failures=Failures(crash=0.0, hang=0.05, timeout_s=300.0, kills=0.3))}, seed=3)
    for index in range(10):
        for one, two in zip(
            Agents({"d": domain()}, seed=3).item(index).members, spared.item(index).members, strict=True
        ):
            assert asked(one) == asked(two)[: len(one.steps)]


def test_groups_share_the_prompt_and_domains_the_system_prompt() -> None:
    agents = Agents({"a": domain(sub_agents=SubAgents(rate=0.0)), "b": domain()}, seed=1, group=4)
    systems: dict[str, set[tuple[int, int]]] = {"a": set(), "b": set()}
    tasks: list[int] = []
    for index in range(20):
        item = agents.item(index)
        firsts = {member.steps[0].path[:2] for member in item.members}
        assert len(firsts) == 1
        ((system, task),) = firsts
        systems[item.domain].add(system)
        tasks.append(task[0])
        own = [
            {c for s in member.steps for c, _ in s.path} - {system[0], task[0]} - {1, 3}  # 1, 3: sub-agents' systems
            for member in item.members
        ]
        assert sum(map(len, own)) == len(set.union(*own)), "members share nothing else"
    assert [len(found) for found in systems.values()] == [1, 1]
    assert systems["a"] != systems["b"]
    assert len(set(tasks)) == 20


def test_shares_of_domains_hold() -> None:
    agents = Agents({"a": domain(share=1.0), "b": domain(share=3.0)}, seed=1, group=1)
    assert [sum(agents.item(i).domain == "a" for i in range(k, k + 20)) for k in (0, 20)] == [5, 5]


# --- laws ------


def test_tool_waits_have_the_fields_quantiles() -> None:
    z = np.array([0.0, 1.2815515655, 2.3263478740, 6.0])
    p50, p90, p99, longest = Law(AgentDomain().tool_wait)(z)
    assert (p50, p90, p99) == (9.0, pytest.approx(71, rel=0.01), pytest.approx(611, rel=0.01))
    assert longest == AgentDomain().tool_wait.cap
    output = AgentDomain().output_tokens
    assert 25 <= output.cap / output.median <= 32


@given(
    st.floats(0.1, 3.0),
    st.floats(0.0, 0.5),
    st.floats(0.5, 4.0),
    st.lists(st.floats(-9, 9), min_size=2, max_size=20),
)
def test_a_law_rises_to_its_cap(sigma: float, share: float, index: float, z: list[float]) -> None:
    law = Law(Spread(median=10.0, sigma=sigma, tail_share=share, tail_index=index, cap=400.0))
    values = law(np.sort(np.array(z)))
    assert np.all(np.diff(values) >= -1e-9)
    assert values.max() <= 400.0
    assert law(np.array([0.0]))[0] == pytest.approx(10.0)


def test_the_tail_is_heavier_than_the_body_by_its_index() -> None:
    """Beyond its start the chance of twice as much is 2^-index."""
    z = np.random.default_rng(0).standard_normal(200_000)
    values = Law(Spread(median=1.0, sigma=1.0, tail_share=0.1, tail_index=1.2, cap=1e9))(z)
    start = np.exp(1.2815515655)
    assert np.mean(values > start) == pytest.approx(0.1, abs=0.003)
    assert np.mean(values > 2 * start) / np.mean(values > start) == pytest.approx(2**-1.2, abs=0.02)


def test_defaults_hold_over_calls() -> None:
    agents = Agents({"d": AgentDomain(item_share=0.0, calls=Spread(median=10.0, sigma=0.0, cap=10.0))}, seed=5)
    steps = [step for member in members(agents, 250) for step in member.steps]
    waits = [step.delay_s for step in steps if len(step.after) == 1 and step.path[0][0] == 0]
    p50, p90, p99 = np.percentile(waits, [50, 90, 99])
    assert (p50, p90) == (pytest.approx(9.0, rel=0.06), pytest.approx(71, rel=0.08))
    assert p99 == pytest.approx(611, rel=0.25)
    outputs = [step.output for step in steps]
    assert np.median(outputs) == pytest.approx(212, rel=0.05)
    assert max(outputs) == 6000


def test_harder_items_are_longer_and_pass_less_often() -> None:
    agents = Agents({"d": domain(item_share=0.5, failures=Failures(crash=0.0, hang=0.0, kills=0.0))}, seed=2)
    items = [agents.item(index) for index in range(150)]

    def mean(item: Group, what: str) -> float:
        return float(np.mean([m.reward if what == "reward" else len(m.steps) for m in item.members]))

    difficulty = [item.difficulty for item in items]
    assert np.corrcoef(difficulty, [mean(item, "steps") for item in items])[0, 1] > 0.4
    assert np.corrcoef(difficulty, [mean(item, "reward") for item in items])[0, 1] < -0.4
    assert np.mean([mean(item, "reward") for item in items]) == pytest.approx(0.3, abs=0.05)


# --- what happens ------


def quiet(**values: Any) -> AgentDomain:
    """Nothing happens by itself; every member makes six calls."""
    never = {"sub_agents": SubAgents(rate=0.0), "failures": Failures(hang=0.0)}
    fixed = Spread(median=6.0, sigma=0.0, cap=6.0)
    return domain(**{**never, "calls": fixed, "tool_wait": Spread(median=1.0, cap=9.0), **values})


def test_a_rewritten_context_keeps_the_first_prompt() -> None:
    context = Context(limit_tokens=4000, reserve_tokens=500, summary_tokens=100)
    found = 0
    for member in members(Agents({"d": quiet(context=context)}, seed=1), 20):
        first = member.steps[0]
        for before, step in pairwise(member.steps):
            assert step.prompt + 500 <= 4000
            if before.keep:
                assert step.prompt > before.prompt + before.output
                assert step.path[-1][0] == before.path[-1][0]
                continue
            found += 1
            assert step.prompt == first.prompt + 100
            assert step.path[:2] == first.path[:2]
            assert step.path[2][0] not in {c for s in member.steps[: member.steps.index(step)] for c, _ in s.path}
    assert found > 20


def test_a_rewritten_context_keeps_what_is_asked() -> None:
    """The longest prompt of at most 3000 tokens, under whatever chains it was."""
    context = Context(limit_tokens=6000, reserve_tokens=500, summary_tokens=100, kept_tokens=3000)
    found = 0
    for member in members(Agents({"d": quiet(context=context)}, seed=1), 20):
        prompts = [step.prompt for step in member.steps]
        for before, step in pairwise(member.steps):
            if before.keep:
                continue
            found += 1
            first_rewritten = next(k for k, s in enumerate(member.steps, 1) if not s.keep)
            kept = max(prompt for prompt in prompts[:first_rewritten] if prompt <= 3000)
            assert step.prompt == kept + 100
            stays = [pair for pair in member.steps[prompts.index(kept)].path if pair[1]]
            assert list(step.path[: len(stays)]) == stays
    assert found > 10


def test_the_parent_waits_for_its_sub_agents() -> None:
    subs = SubAgents(rate=0.5, most=3, calls=FAST, system_tokens=300, task_tokens=90)
    fans = set()
    for member in members(Agents({"d": quiet(sub_agents=subs)}, seed=1), 10):
        parents = [i for i, step in enumerate(member.steps) if step.path[0][0] == 0]
        for before, i in pairwise(parents):
            step = member.steps[i]
            if step.after == (before,):
                continue
            fans.add(len(step.after))
            assert step.delay_s == 0
            assert set(step.after) <= set(range(before + 1, i))
            for end in step.after:
                while end != before:
                    assert member.steps[end].path[0] == (1, 300 // 16)
                    (end,) = member.steps[end].after
    assert fans == {1, 2, 3}


@pytest.mark.parametrize("slow", [False, True], ids=["hangs", "waits too long"])
def test_a_time_out_is_the_wait_and_kills_some(slow: bool) -> None:
    failures = Failures(hang=0.0 if slow else 0.3, timeout_s=8.0, kills=0.25)
    wait = Spread(median=5.5, sigma=0.7, cap=99.0) if slow else Spread(median=1.0, sigma=0.1, cap=2.0)
    found = members(Agents({"d": quiet(failures=failures, tool_wait=wait)}, seed=1), 100)
    timeouts, killed = sum(member.timeouts for member in found), [member for member in found if member.death]
    assert len(killed) / timeouts == pytest.approx(0.25, abs=0.05)
    assert all(member.death is DeathReason.ENVIRONMENT and member.idle_s == 8.0 for member in killed)
    waits = [step.delay_s for member in found for step in member.steps]
    assert max(waits) == 8.0
    assert waits.count(8.0) == timeouts - len(killed), "the others go on"
    assert all(len(member.steps) == 6 for member in found if member.death is None)


def test_crashes_end_a_member_anywhere() -> None:
    found = members(Agents({"d": quiet(failures=Failures(crash=0.5, hang=0.0))}, seed=1), 60)
    crashed = [member for member in found if member.death is DeathReason.AGENT_CRASH]
    assert len(crashed) / len(found) == pytest.approx(0.5, abs=0.08)
    assert {len(member.steps) for member in crashed} == {1, 2, 3, 4, 5, 6}
    assert all(len(member.steps) == 6 for member in found if member.death is None)


@pytest.mark.parametrize("rate", [0.0, 0.3], ids=["alone", "with sub-agents"])
def test_beyond_the_engines_context_answers_are_cut_and_prompts_refused(rate: float) -> None:
    """Up to the first answer that is cut, all is as with an engine of any context."""
    subs = SubAgents(rate=rate, most=3, calls=FAST, system_tokens=300, task_tokens=90)
    models = {"d": domain(sub_agents=subs, failures=Failures(hang=0.0))}
    free, bound = members(Agents(models, seed=1), 30), members(Agents(models, seed=1, max_context=3500), 30)
    refused = cut = 0
    for unbound, member in zip(free, bound, strict=True):
        check(member, 16, 3500)
        if all(step.prompt + step.output < 3500 for step in unbound.steps):
            assert asked(member) == asked(unbound)
            assert member.death is unbound.death
            continue
        first = next(i for i, step in enumerate(unbound.steps) if step.prompt + step.output >= 3500)
        assert asked(member)[:first] == asked(unbound)[:first]
        if first < len(member.steps):
            cut += member.steps[first].output == 3500 - unbound.steps[first].prompt
        if member.death is DeathReason.ENVIRONMENT:
            refused += 1
            assert len(member.steps) < len(unbound.steps)
    assert min(refused, cut) > 20


def test_the_wait_before_a_refused_prompt_is_the_members_end() -> None:
    context = Context(limit_tokens=9000, reserve_tokens=900, summary_tokens=300)
    models = {"d": quiet(context=context, result_tokens=Spread(median=900.0, sigma=0.0, cap=900.0))}
    found = members(Agents(models, seed=1, max_context=3500), 20)
    for unbound, member in zip(members(Agents(models, seed=1), 20), found, strict=True):
        if member.death is DeathReason.ENVIRONMENT:
            last = member.steps[-1]
            assert last.prompt + last.output + 900 >= 3500
            assert member.idle_s == unbound.steps[len(member.steps)].delay_s > 0
    assert sum(member.death is DeathReason.ENVIRONMENT for member in found) > 50


# --- errors ------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Spread(median=5.0, cap=4.0), "cap = 4 must be at least median = 5"),
        (lambda: Spread(median=0.0, cap=4.0), "greater than 0"),
        (
            lambda: AgentDomain(context=Context(limit_tokens=20000)),
            "context.limit_tokens = 20000: a first or rewritten",
        ),
        (lambda: domain(sub_agents=SubAgents(rate=0.1, system_tokens=7000, task_tokens=1000)), "prompt may have 8300"),
        (lambda: AgentDomain(context=Context(kept_tokens=130000)), "raise the limit or shorten the prompts"),
        (lambda: AgentDomain(failures=Failures(hang=1.0)), "exceed 1"),
        (lambda: AgentDomain.model_validate({"tool_waits": 3}), "tool_waits"),
    ],
)
def test_sections_refuse_what_cannot_be(make: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        make()


def test_agents_need_a_domain_a_group_and_blocks() -> None:
    with pytest.raises(ForgeError, match="domains: 0 of them"):
        Agents({}, seed=0)
    with pytest.raises(ForgeError, match="group: 0"):
        Agents({"d": domain()}, seed=0, group=0)
