"""Which scaffold an item of a live run is played in."""

from __future__ import annotations

from forge.live.scaffolding import scaffold_of
from forge.scaffolds import DEFAULT
from forge.scenario import Scenario, parse


def scenario(seed: int, *names: str) -> Scenario:
    told = {"name": "x", "seed": seed, "stop": {"items": 1}, "domains": [{"name": "calc"}]}
    return parse(told | ({"agents": {"scaffolds": list(names)}} if names else {}), "x")


def test_members_and_attempts_of_an_item_share_one_and_items_differ() -> None:
    mixed = scenario(0, "plain/*/all/bare")
    assert scaffold_of(mixed, "12.0.0") == scaffold_of(mixed, "12.7.3")
    assert len({scaffold_of(mixed, f"{position}.0.0").id for position in range(100)}) > 10
    other = [scaffold_of(scenario(1, "plain/*/all/bare"), f"{p}.0.0") for p in range(20)]
    assert other != [scaffold_of(mixed, f"{p}.0.0") for p in range(20)]


def test_a_held_out_task_has_one_in_every_evaluation_of_every_seed() -> None:
    one, other = scenario(0, "plain/*/all/bare"), scenario(5, "plain/*/all/bare")
    for index in range(10):
        assert scaffold_of(one, f"eval-start-{index}.0") == scaffold_of(other, f"eval-end-{index}.0")


def test_without_a_word_it_is_the_default() -> None:
    assert scaffold_of(scenario(0), "3.1.0").id == DEFAULT
