"""Every pure domain: pure tasks, disjoint splits, tools that really run, a verifier that takes any string."""

from __future__ import annotations

import json
from itertools import combinations
from random import Random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.agents.experts import PERFECT, SLOPPY, demonstrate
from forge.domains.base import Split, ToolError
from forge.domains.registry import PURE, get_domain
from forge.domains.splits import split_of
from forge.domains.tools import evaluate, run_tool
from forge.types import ForgeError

SPLITS: tuple[Split, ...] = get_args(Split)
NAMES = sorted(PURE)
KNOWN = {
    "calc": "Compute 61*57",
    "chain": "Follow links from y11",
    "gcd": "Find the Greatest Common Divisor (GCD) of these numbers: 15, 21. Give only the GCD as your final answer.",
    "products": "Solve the following multiplication: 6 * 7. Give only the result as your final answer.",
    "shop": "Price of 6*bowl+9*pan",
}
seeds = st.integers(min_value=0, max_value=2**31 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ForgeError, match="'chess' is not known; known domains: calc, chain, coding, gcd"):
        get_domain("chess")


@pytest.mark.parametrize("name", NAMES)
@given(split=st.sampled_from(SPLITS), seed=seeds, index=seeds)
@settings(max_examples=20, deadline=None)
def test_a_task_is_a_pure_function_of_its_arguments(name: str, split: Split, seed: int, index: int) -> None:
    task = get_domain(name).task(split, seed, index)
    assert task == get_domain(name).task(split, seed, index)
    assert split_of(name, task.data["problem"]) == split
    assert json.loads(json.dumps(task.data)) == task.data


@pytest.mark.parametrize("name", NAMES)
def test_no_problem_is_in_two_splits(name: str) -> None:
    domain = get_domain(name)
    prompts = [{domain.task(split, seed, index).prompt for seed in (1, 2) for index in range(200)} for split in SPLITS]
    assert not any(first & second for first, second in combinations(prompts, 2))


def test_a_known_task_stays_the_same_for_ever() -> None:
    # Task ids lie in pools and traces: a changed generator would silently change what they mean.
    prompts = {name: get_domain(name).task("held_out", 7, 3).prompt for name in NAMES}
    assert prompts == KNOWN


@pytest.mark.parametrize("name", NAMES)
@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_the_perfect_expert_scores_one_within_the_limits(name: str, seed: int) -> None:
    domain = get_domain(name)
    task = domain.task("train", seed, 0)
    messages = demonstrate(domain, task, Random(seed), PERFECT)
    assert domain.score(task, messages[-1]["content"]) == 1.0
    assert sum(message["role"] == "assistant" for message in messages) <= domain.max_turns


@pytest.mark.parametrize("name", NAMES)
def test_the_sloppy_expert_succeeds_between_a_fifth_and_half_of_the_time(name: str) -> None:
    domain = get_domain(name)
    rng = Random(0)
    tasks = [domain.task("train", 5, index) for index in range(300)]
    scores = [domain.score(task, demonstrate(domain, task, rng, SLOPPY)[-1]["content"]) for task in tasks]
    assert 0.2 < sum(scores) / len(scores) < 0.5


@pytest.mark.parametrize("name", NAMES)
@given(answer=st.text())
@settings(max_examples=30, deadline=None)
def test_any_answer_has_a_score_and_only_the_right_one_passes(name: str, answer: str) -> None:
    domain = get_domain(name)
    task = domain.task("train", 1, 1)
    right: str = task.data["answer"]
    assert domain.score(task, answer) == float(answer.strip() == right)
    assert domain.score(task, f" {right}\n") == 1.0
    assert domain.score(task, f"{right}9 {right}") == 0.0


@pytest.mark.parametrize("name", NAMES)
@given(
    tool=st.sampled_from(["calc", "lookup", ""]) | st.text(),
    arguments=st.dictionaries(st.sampled_from(["expression", "key"]) | st.text(), json_values, max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_a_bad_call_is_a_tool_error_and_nothing_else(name: str, tool: str, arguments: dict[str, object]) -> None:
    domain = get_domain(name)
    task = domain.task("train", 1, 2)
    result, worked = run_tool(domain, task, tool, arguments)
    assert worked or result.startswith("error: ")


@pytest.mark.parametrize("name", NAMES)
def test_every_offered_tool_can_be_called_as_its_schema_says(name: str) -> None:
    domain = get_domain(name)
    task = domain.task("train", 1, 2)
    good = {"expression": "2*3", "key": next(iter(task.data.get("table", {"none": ""})))}
    for tool in domain.tools(task):
        (argument,) = tool["function"]["parameters"]["required"]
        assert domain.call(task, tool["function"]["name"], {argument: good[argument]})


@given(expression=st.text(alphabet="0123456789+-*() ", max_size=70))
@settings(max_examples=300, deadline=None)
def test_the_calculator_agrees_with_python_or_refuses(expression: str) -> None:
    try:
        value = evaluate(expression)
    except ToolError:
        return
    assert value == eval(expression.strip(), {"__builtins__": {}})  # the oracle, on text the calculator accepted


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9", "bad expression"),
        ("__import__('os')", "bad expression"),
        ("1/2", "bad expression"),
        ("1.5", "bad expression"),
        ("007", "bad expression"),
        ("", "bad expression"),
        ("1(2)", "bad expression"),
        ("(" * 40 + "1" + ")" * 20, "bad expression"),
        ("1" * 65, "expression too long"),
        ("9" * 16, "value too large"),
        ("*".join(["99999"] * 4), "value too large"),
    ],
)
def test_the_calculator_refuses(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        evaluate(expression)
