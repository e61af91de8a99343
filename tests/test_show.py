"""A trajectory as a tree: who goes on from whom, and where in time."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from forge.report.conversation import LINE, common, facts, span, timeline, token_rows, tree
from forge.types import Completion, Outcome, Trajectory


def completion(index: int, prompt: tuple[int, ...], sampled: tuple[int, ...], **over: Any) -> Completion:
    values: dict[str, Any] = {
        "trajectory": "0.0.0",
        "index": index,
        "prompt_ids": prompt,
        "sampled_ids": sampled,
        "logprobs": (-0.5,) * len(sampled),
        "versions": (index,) * len(sampled),
        "finish": "stop",
        "temperature": 1.0,
        "received_s": float(index),
        "first_token_s": index + 0.25,
        "finished_s": index + 0.5,
        "instance": 0,
    }
    return Completion(**(values | over))


def trajectory(*completions: Completion) -> Trajectory:
    return Trajectory(
        id="0.0.0", position=0, member=0, completions=completions, outcome=Outcome(trajectory="0.0.0", reward=1.0)
    )


def test_completions_hang_on_their_parents_and_show_what_is_new() -> None:
    first = completion(0, (1, 2), (3,), fork="root")
    on = completion(1, (1, 2, 3, 4), (5,), parent=0)
    branch = completion(2, (1, 2, 3, 6), (7,), parent=0, fork="branch")
    retokenised = completion(3, (1, 9, 8), (7,), parent=0, fork="template")
    other = completion(4, (9,), (), fork="sub_agent")
    roots = tree(trajectory(first, on, branch, retokenised, other))
    assert [turn.completion.index for turn in roots] == [0, 4]
    assert [turn.completion.index for turn in roots[0].children] == [1, 2, 3]
    assert [turn.new_ids for turn in roots[0].children] == [(4,), (6,), (9, 8)]
    assert "[branch]" in facts(roots[0].children[1])
    assert "prompt 4 (1 new), sampled 1, stop, weights 1" in facts(roots[0].children[0])
    assert "no token" in facts(roots[1])


def test_a_pool_that_does_not_say_is_read_by_its_ids() -> None:
    turns = [completion(0, (1,), (2,)), completion(1, (1, 2, 3), (4,)), completion(2, (1, 2, 3, 4, 5), (6,))]
    apart = completion(3, (7,), (8,))
    roots = tree(trajectory(*turns, apart))
    assert [turn.completion.index for turn in roots] == [0, 3]
    assert roots[0].children[0].children[0].completion.index == 2


@given(st.lists(st.floats(0, 1e6), min_size=3, max_size=3), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_time_line_has_its_width_and_its_parts_in_order(times: list[float], before: float, after: float) -> None:
    received, first, finished = sorted(times)
    one = completion(0, (1,), (2,), received_s=received, first_token_s=first, finished_s=finished)
    drawn = timeline(one, max(0.0, received - before), finished + after)
    assert len(drawn) == LINE
    assert drawn.strip(" ").lstrip("░").strip("█") == ""
    assert "█" in drawn


def test_tokens_have_their_logprob_and_weights() -> None:
    one = completion(0, (1,), (2, 3), logprobs=(-0.1, -2.0), versions=(4, 5))
    assert token_rows(one, lambda ids: "ab"[ids[0] - 2]) == [("a", -0.1, 4), ("b", -2.0, 5)]
    assert span(trajectory(one, completion(1, (1,), ()))) == (0.0, 1.5)
    assert span(trajectory()) == (0.0, 0.0)


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_is_the_longest_prefix(one: list[int], other: list[int]) -> None:
    n = common(one, other)
    assert one[:n] == other[:n]
    assert n in (len(one), len(other)) or one[n] != other[n]
