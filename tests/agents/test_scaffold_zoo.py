"""Scaffold ids: stable, parsed back, distinct; what is unknown is refused with near ones."""

from __future__ import annotations

from collections import Counter

import pytest

from forge import scaffolds
from forge.agents.loops import RUN
from forge.agents.strategies import RULES
from forge.domains.registry import PURE
from forge.scenario import parse
from forge.types import ForgeError

SCENARIO = {"name": "x", "stop": {"items": 1}, "domains": [{"name": "calc"}]}


def test_there_are_hundreds_and_each_is_its_id() -> None:
    assert len(set(scaffolds.zoo())) == len(scaffolds.zoo()) >= 300
    for name in scaffolds.zoo()[::97]:
        assert scaffolds.get(name).id == name
    assert scaffolds.DEFAULT in scaffolds.zoo()


def test_every_loop_and_strategy_is_implemented() -> None:
    assert set(RUN) == set(scaffolds.LOOPS)
    kinds = {scaffolds.get(f"plain/native/{name}/bare").strategy.kind for name in scaffolds.CONTEXTS}
    assert (
        kinds == {name.partition("-")[0] for name in scaffolds.STRATEGIES} == {*RULES, "all", "cut", "own", "summarise"}
    )


def test_a_dialect_may_be_any_format() -> None:
    name = "react/hermes:keys=name/parameters,space=spaced~named/window-7/rules"
    one = scaffolds.get(name)
    assert (one.id, one.format, one.results) == (name, "hermes:keys=name/parameters,space=spaced", "named")
    assert scaffolds.get("plain/llama3/all/bare").format == "llama3"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("plain", "an id is loop/dialect/context/style"),
        ("", "an id is"),
        ("plane/native/all/bare", "no loop 'plane'"),
        ("plain/hermes~x/all/bare", "no dialect 'hermes~x'"),
        ("plain/native/window/bare", "no context 'window'"),
        ("plain/native/window-0/bare", "no context"),
        ("plain/native/all/loud", "no style 'loud'"),
    ],
)
def test_unknown_ids_are_refused(name: str, why: str) -> None:
    with pytest.raises(ForgeError, match="`forge scaffolds` lists them") as refused:
        scaffolds.get(name)
    assert why in str(refused.value)


def test_a_near_id_is_named() -> None:
    with pytest.raises(ForgeError, match="near: plain/native/all/bare"):
        scaffolds.get("plain/native/all/bar")


def test_patterns_select_from_the_zoo() -> None:
    assert scaffolds.select(["plain/native/*/bare"]) == [f"plain/native/{one}/bare" for one in scaffolds.CONTEXTS]
    small = scaffolds.select(["quickstart"])
    assert len(small) >= 100
    assert scaffolds.select([small[0], "quickstart"]) == small
    with pytest.raises(ForgeError, match="no scaffold of the zoo"):
        scaffolds.select(["nothing/*"])


def test_the_quickstart_is_told_of_no_tools_and_given_its_own_room() -> None:
    for name in scaffolds.small():
        one = scaffolds.get(name)
        assert not scaffolds.STYLES[one.style].tells
        assert one.room(32) == 32
    assert scaffolds.get("react/hermes/all/rules").room(32) == 256


def test_a_hundred_thousand_combinations_are_enumerable() -> None:
    environments = sorted(PURE)
    first = [scaffolds.combination(index, environments) for index in range(0, 200_000, 1999)]
    assert len({(one.id, environment, seed) for one, environment, seed in first}) == len(first)
    assert scaffolds.combination(0, environments)[1:] == (environments[0], 0)
    assert scaffolds.combination(len(scaffolds.zoo()) * len(environments), environments)[2] == 1


def test_draws_follow_the_weights_and_the_key_alone() -> None:
    weights = {"plain/native/all/bare": 3.0, "single/native/all/bare": 1.0}
    found = Counter(scaffolds.drawn(weights, f"0:{key}").loop for key in range(2000))
    assert 0.70 < found["plain"] / 2000 < 0.80
    assert scaffolds.drawn(weights, "7") == scaffolds.drawn(dict(weights), "7")


def test_a_scenario_names_them() -> None:
    assert parse(SCENARIO, "x").agents.scaffolds == {scaffolds.DEFAULT: 1.0}
    listed = parse(SCENARIO | {"agents": {"scaffolds": ["plain/native/*/bare"]}}, "x").agents.scaffolds
    assert set(listed) == set(scaffolds.select(["plain/native/*/bare"]))
    weighed = {"plain/native/all/bare": 2, "react/hermes/all/rules": 1}
    assert parse(SCENARIO | {"agents": {"scaffolds": weighed}}, "x").agents.scaffolds == weighed
    for wrong in (["plain/native/all/bar"], {"plain/native/all/bar": 1}):
        with pytest.raises(ForgeError, match=r"agents\.scaffolds.*near: plain/native/all/bare"):
            parse(SCENARIO | {"agents": {"scaffolds": wrong}}, "x")
    with pytest.raises(ForgeError, match=r"agents\.scaffolds"):
        parse(SCENARIO | {"agents": {"scaffolds": []}}, "x")
