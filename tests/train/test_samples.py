"""Merging recorded completions into training samples."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.train.advantage import DeadGroupError
from forge.train.samples import RecordError, batch_samples, merge_appends, outcome_rewards, to_samples
from forge.types import Completion, DeathReason, Outcome, TrainSample, Trajectory


def completion(
    index: int,
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    *,
    temperature: float = 1.0,
    logprobs: tuple[float, ...] | None = None,
) -> Completion:
    """Logprobs name their origin: completion i, token j has -(i + 1 + j / 100)."""
    named = tuple(-(index + 1 + j / 100) for j in range(len(sampled)))
    return Completion(
        trajectory="t",
        index=index,
        prompt_ids=prompt,
        sampled_ids=sampled,
        logprobs=named if logprobs is None else logprobs,
        versions=(0,) * len(sampled),
        finish="stop",
        temperature=temperature,
        received_s=0.0,
        first_token_s=0.0,
        finished_s=0.0,
        instance=0,
    )


def trajectory(*completions: Completion, reward: float | None = 1.0, position: int = 0, member: int = 0) -> Trajectory:
    reason = None if reward is not None else DeathReason.AGENT_CRASH
    outcome = Outcome(trajectory="t", reward=reward, reason=reason)
    return Trajectory(id="t", position=position, member=member, completions=completions, outcome=outcome)


def test_appending_turns_share_one_sample() -> None:
    turns = (
        completion(0, (1, 2), (3, 4)),
        completion(1, (1, 2, 3, 4, 5), (6,)),
        completion(2, (1, 2, 3, 4, 5, 6), (7, 8)),
    )
    (sample,) = to_samples(trajectory(*turns, position=9, member=3), [0.5, 0.0, -1.0])
    assert sample == TrainSample(
        position=9,
        member=3,
        token_ids=(1, 2, 3, 4, 5, 6, 7, 8),
        loss=(False, False, True, True, False, True, True, True),
        logprobs=(0.0, 0.0, -1.0, -1.01, 0.0, -2.0, -3.0, -3.01),
        advantages=(0.0, 0.0, 0.5, 0.5, 0.0, 0.0, -1.0, -1.0),
    )


def test_a_rewritten_context_starts_a_new_sample() -> None:
    turns = (completion(0, (1, 2), (3,)), completion(1, (1, 9, 3), (4,)), completion(2, (1, 9, 3, 4), (5,)))
    first, second = to_samples(trajectory(*turns), [1.0, 2.0, 3.0])
    assert (first.token_ids, first.loss) == ((1, 2, 3), (False, False, True))
    assert (second.token_ids, second.loss) == ((1, 9, 3, 4, 5), (False, False, False, True, True))


def test_one_changed_token_id_is_a_fork_even_if_the_text_is_equal() -> None:
    """Re-tokenisation drift: the next prompt spells the sampled text with other ids. The record is the truth."""
    drifted = (completion(0, (1,), (2, 3)), completion(1, (1, 23, 4), (5,)))
    assert [strand.token_ids for strand in merge_appends(drifted)] == [[1, 2, 3], [1, 23, 4, 5]]


def test_the_longest_earlier_strand_is_extended_whatever_its_age() -> None:
    turns = (
        completion(0, (1,), (2,)),  # strand A
        completion(1, (7,), (8,)),  # a sub-agent: strand B
        completion(2, (1, 2, 3), (4,)),  # A again, after B
        completion(3, (1, 2, 5), (6,)),  # a fork of A as it was before: strand C, its prefix without loss
        completion(4, (1, 2, 5, 6, 3), (4,)),  # extends C
        completion(5, (7, 8, 1), (2,)),  # extends B
    )
    strands = merge_appends(turns)
    assert [strand.token_ids for strand in strands] == [[1, 2, 3, 4], [7, 8, 1, 2], [1, 2, 5, 6, 3, 4]]
    assert [strand.spans for strand in strands] == [[(1, 0), (3, 2)], [(1, 1), (3, 5)], [(3, 3), (5, 4)]]


def test_the_longest_of_two_prefixes_wins() -> None:
    turns = (completion(0, (1,), (2,)), completion(1, (1,), (2, 3)), completion(2, (1, 2, 3, 4), (5,)))
    assert [strand.token_ids for strand in merge_appends(turns)] == [[1, 2], [1, 2, 3, 4, 5]]


def test_another_temperature_is_another_sample() -> None:
    turns = (completion(0, (1,), (2,)), completion(1, (1, 2), (3,), temperature=0.5))
    assert [sample.temperature for sample in to_samples(trajectory(*turns), [1.0, 1.0])] == [1.0, 0.5]


def test_a_completion_without_tokens_is_passed_over() -> None:
    turns = (completion(0, (1, 2), ()), completion(1, (1, 2), (3,)), completion(2, (1, 2, 3), ()))
    (sample,) = to_samples(trajectory(*turns), [5.0, 6.0, 7.0])
    assert sample.advantages == (0.0, 0.0, 6.0)


@pytest.mark.parametrize("constrained", [True, False])
def test_a_token_that_its_grammar_forced_carries_no_loss(constrained: bool) -> None:
    one = replace(completion(0, (1,), (2, 3, 4), logprobs=(-0.5, 0.0, -0.1)), constrained=constrained)
    (sample,) = to_samples(trajectory(one), [1.0])
    assert sample.loss == (False, True, not constrained, True)
    assert sample.logprobs == (0.0, -0.5, 0.0, -0.1)


def test_token_0_never_carries_loss() -> None:
    (sample,) = to_samples(trajectory(completion(0, (), (1, 2))), [1.0])
    assert (sample.loss, sample.logprobs, sample.advantages) == ((False, True), (0.0, -1.01), (0.0, 1.0))


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (completion(4, (1,), (2, 3), logprobs=(-1.0,)), "1 logprobs for 2"),
        (completion(4, (1,), (2,), logprobs=(-math.inf,)), "not finite"),
        (completion(4, (1,), (2,), temperature=0.0), "temperature 0"),
    ],
    ids=["lost logprobs", "impossible token", "greedy"],
)
def test_a_record_that_cannot_be_trained_on_is_refused(bad: Completion, words: str) -> None:
    with pytest.raises(RecordError, match=f"completion 4.*{words}"):
        merge_appends([bad])


# Two token values and short runs, so that prefixes coincide often.
runs = st.lists(st.integers(1, 2), max_size=3).map(tuple)


@st.composite
def conversations(draw: st.DrawFn) -> list[Completion]:
    """Completions whose prompts append to any earlier completion, to a part of it, or to nothing."""
    made: list[Completion] = []
    for index in range(draw(st.integers(0, 7))):
        base: tuple[int, ...] = ()
        if made and draw(st.booleans()):
            earlier = draw(st.sampled_from(made))
            whole = earlier.prompt_ids + earlier.sampled_ids
            base = whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole
        prompt = base + draw(runs)
        made.append(completion(index, prompt, draw(runs), temperature=draw(st.sampled_from([1.0, 0.5]))))
    return made


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_every_sampled_token_is_trained_on_once_behind_its_own_prompt(turns: list[Completion]) -> None:
    strands = merge_appends(turns)
    seen = []
    for strand in strands:
        for start, i in strand.spans:
            stop = start + len(turns[i].sampled_ids)
            assert tuple(strand.token_ids[:start]) == turns[i].prompt_ids
            assert tuple(strand.token_ids[start:stop]) == turns[i].sampled_ids
            assert strand.temperature == turns[i].temperature
            seen.append(i)
        assert strand.spans == sorted(strand.spans)
    assert sorted(seen) == [turn.index for turn in turns if turn.sampled_ids]


def brute_ends(turns: list[Completion]) -> list[tuple[float, tuple[int, ...]]]:
    """The strands' contents by the rule read literally."""
    strands: list[tuple[float, tuple[int, ...]]] = []
    for turn in turns:
        if turn.sampled_ids:
            whole = turn.prompt_ids + turn.sampled_ids
            fits = [s for s in strands if s[0] == turn.temperature and turn.prompt_ids[: len(s[1])] == s[1]]
            if fits:
                strands.remove(max(fits, key=lambda s: len(s[1])))
            strands.append((turn.temperature, whole))
    return sorted(strands)


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_merging_follows_the_rule(turns: list[Completion]) -> None:
    assert sorted((s.temperature, tuple(s.token_ids)) for s in merge_appends(turns)) == brute_ends(turns)


@settings(max_examples=60, deadline=None)
@given(conversations())
def test_samples_keep_logprobs_and_advantages_by_token(turns: list[Completion]) -> None:
    samples = to_samples(trajectory(*turns), [float(10 + i) for i in range(len(turns))])
    got = sorted(
        (logprob, advantage)
        for sample in samples
        for on, logprob, advantage in zip(sample.loss, sample.logprobs, sample.advantages, strict=True)
        if on
    )
    expected = sorted(
        (logprob, 10.0 + i)
        for i, turn in enumerate(turns)
        for j, logprob in enumerate(turn.logprobs)
        if turn.prompt_ids or j
    )
    assert got == expected


def test_batch_samples_from_outcomes() -> None:
    win = trajectory(completion(0, (1,), (2,)), completion(1, (1, 2), (3,)), reward=1.0)
    loss = trajectory(completion(0, (1,), (4,)), reward=0.0, member=1)
    crash = trajectory(completion(0, (1,), (5,)), reward=None, member=2)
    silent = trajectory(reward=0.0, member=3)
    won, lost = batch_samples([[win, loss, crash, silent]], eps=0.0)
    # Raw advantages 1 (vs R_0 = 0), 1 (nobody else reached turn 1: R_0 again) and -1; their deviation is 0.943.
    assert won.advantages == pytest.approx((0.0, 1.0 / 0.9428090, 1.0 / 0.9428090))
    assert lost.advantages == pytest.approx((0.0, -1.0 / 0.9428090))
    with pytest.raises(DeadGroupError):
        batch_samples([[win, crash, silent]])


def test_a_dead_trajectory_has_no_reward() -> None:
    with pytest.raises(ValueError, match="agent_crash"):
        outcome_rewards(trajectory(completion(0, (1,), (2,)), reward=None))


def test_wrong_number_of_advantages_is_refused() -> None:
    with pytest.raises(ValueError, match="1 advantages for 2 completions"):
        to_samples(trajectory(completion(0, (1,), (2,)), completion(1, (1, 2), (3,))), [1.0])
