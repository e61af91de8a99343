"""The domains by name. Adding one: a module that implements `Domain`, one entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forge.domains.base import Domain, PureDomain
from forge.domains.calc import Calc
from forge.domains.chain import Chain
from forge.domains.coding import Coding
from forge.domains.reasoning import gcd, products
from forge.domains.shop import Shop
from forge.types import ForgeError

#: what the shipped model was warm-started on, and its vocabulary made from
PURE: dict[str, Callable[[], PureDomain]] = {
    "calc": Calc,
    "chain": Chain,
    "gcd": gcd,
    "products": products,
    "shop": Shop,
}
DOMAINS: dict[str, Callable[[], Domain]] = {**PURE, "coding": Coding}


def warm_up(names: Iterable[str]) -> None:
    """Pay now for what a first task costs: a library behind a domain may take seconds to import, and would stop
    every other episode of an event loop meanwhile."""
    for name in names:
        get_domain(name).warm_up()


def get_domain(name: str) -> Domain:
    """A fresh instance of the domain called `name`."""
    if name not in DOMAINS:
        raise ForgeError(f"domain {name!r} is not known; known domains: {', '.join(sorted(DOMAINS))}")
    return DOMAINS[name]()
