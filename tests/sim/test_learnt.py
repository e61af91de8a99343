"""Lengths of a policy that has learnt, from one that has not: of those members that passed, item by item."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_scenarios import build

from forge import trace as ev
from forge.scenario import Scenario
from forge.sections import Stop
from sim.calibrate import calibrate
from sim.learnt import as_learnt, imitate, learns, mean_lengths
from sim.paths import Ask, Path, Paths
from sim.recalibrate import recalibrate
from sim.world import simulate


def scenario() -> Scenario:
    made = build({"n": 32, "batch": 8, "concurrency": 24, "group": 4}, sim={"train_step_s": 0.3}, engine={"slots": 48})
    return made.model_copy(update={"stop": Stop(seconds=45.0)})


@pytest.fixture(scope="module")
def events() -> list[ev.Event]:
    return simulate(scenario()).events


def rewarded(events: list[ev.Event], from_s: float = 0.0) -> list[ev.Event]:
    """The same run, in which members of three turns and more pass from `from_s` on, and nobody else."""
    return [
        replace(e, reward=float(e.turns >= 3 and e.t >= from_s)) if isinstance(e, ev.MemberDone) else e for e in events
    ]


def member(turns: int, reward: float) -> Path:
    done = ev.MemberDone(t=1.0, position=0, member=0, reward=reward, turns=turns, tokens=turns, tool_wait_s=0.0)
    return Path("chain", 0.0, [Ask(turn, 0.0, 10, 1.0, 1) for turn in range(turns)], done)


def test_an_item_counts_once_however_seldom_it_is_passed() -> None:
    """Easy: 3 of 4 pass in 2 turns. Hard: 1 of 4 in 5. Nobody passes the third, as hard as the second."""
    easy = [member(2, 1.0)] * 3 + [member(1, 0.0)]
    hard = [member(5, 1.0)] + [member(1, 0.0)] * 3
    lost = [member(1, 0.0)] * 4
    items = {i: dict(enumerate(members)) for i, members in enumerate((easy, hard, lost))}
    paths = Paths(items, {"chain": [1.0, 3.0, 2.9]})
    found = imitate("chain", paths, {0: 1.0, 1: 3.0, 2: 2.9})
    assert found is not None
    assert mean_lengths(found.of("chain")) == (4.0, 4.0)
    assert mean_lengths([p for p in paths.of("chain") if p.done is not None and p.done.reward]) == (2.75, 2.75)


def test_where_nobody_passes_nothing_is_known(events: list[ev.Event]) -> None:
    lost = [replace(e, reward=0.0) if isinstance(e, ev.MemberDone) else e for e in events]
    seen = calibrate(lost, scenario())
    assert as_learnt(seen, lost, scenario()) == seen


def test_lengths_are_those_of_the_passed_and_the_rest_stays(events: list[ev.Event]) -> None:
    won = rewarded(events)
    seen = calibrate(won, scenario())
    learnt = as_learnt(seen, won, scenario())
    before, after = seen.sim.domains["agent"], learnt.sim.domains["agent"]
    assert before.turns[0] > 0.2
    assert after.turns == (0.0, 0.0, 1.0)
    assert learnt.quality["seen.turns.agent"] < learnt.quality["learnt.turns.agent"] == 3.0
    for key in ("death_rate", "reward", "prompt_tokens", "difficulty_mean"):
        assert getattr(before, key) == getattr(after, key), key
    assert learnt.sim.model_copy(update={"domains": {}}) == seen.sim.model_copy(update={"domains": {}})


def test_a_policy_learns_whose_rewards_rise(events: list[ev.Event]) -> None:
    assert not learns(events)
    assert not learns(rewarded(events))
    assert learns(rewarded(events, from_s=15.0))
    assert not learns([])


def test_recalibration_expects_a_policy_that_learns_to_go_on(events: list[ev.Event]) -> None:
    flat = recalibrate(rewarded(events), scenario(), cut_s=20.0, seeds=range(2))
    rising = recalibrate(rewarded(events, from_s=10.0), scenario(), cut_s=20.0, seeds=range(2))
    assert flat is not None
    assert rising is not None
    assert rising["figures"]["items_per_s"]["mean"] < 0.9 * flat["figures"]["items_per_s"]["mean"]
