"""Scaffolds by id, `loop/dialect/context/style`: every combination of their parts is one."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache

from forge.formats import get as get_format
from forge.scaffolds.parts import CONTEXTS, DIALECTS, LOOPS, NATIVE, RESULTS, STYLES, Strategy, strategy
from forge.types import ForgeError

DEFAULT = "plain/native/all/bare"
#: the pattern of those that the shipped model can live in
QUICKSTART = "quickstart"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    """Names of its parts; `get` makes it from an id, which checks them."""

    loop: str
    dialect: str
    context: str
    style: str

    @property
    def id(self) -> str:
        return f"{self.loop}/{self.dialect}/{self.context}/{self.style}"

    @property
    def format(self) -> str:
        """Of its tool calls, an id of forge.formats; "" where they are the API's."""
        return "" if self.dialect == NATIVE else self.dialect.partition("~")[0]

    @property
    def results(self) -> str:
        return self.dialect.partition("~")[2] or "format"

    @property
    def strategy(self) -> Strategy:
        found = strategy(self.context)
        assert found is not None, self.context
        return found

    @property
    def is_small(self) -> bool:
        """Whether a policy with a small vocabulary and context, which knows one way of calling tools, can live in it:
        Hermes' calls, which it was taught, no tools described, no words but short ones."""
        fits = self.format in ("", "hermes") and not STYLES[self.style].tells
        return fits and LOOPS[self.loop].small and self.strategy.kind not in ("own", "summarise")

    def room(self, tokens: int) -> int:
        """Most tokens of a reply, where the domain's own most is `tokens`, which is meant for a bare call or answer."""
        return tokens if self.is_small else 8 * tokens


def get(name: str) -> Scaffold:
    """The scaffold of this id; a format may be any of forge.formats. Raises ForgeError, naming near ones."""
    loop, slash, rest = name.partition("/")
    *dialect, context, style = rest.split("/") if slash else ("", "", "")
    told = Scaffold(loop=loop, dialect="/".join(dialect), context=context, style=style)
    wrong = [part for part, knows in _KNOWN.items() if not knows(getattr(told, part))]
    if wrong:
        raise ForgeError(f"scaffold {name!r}: there is none{_why(told, wrong)}; `forge scaffolds` lists them")
    return told


def _is_dialect(name: str) -> bool:
    if name == NATIVE:
        return True
    form, mark, results = name.partition("~")
    try:
        get_format(form)
    except ForgeError:
        return False
    return not mark or (results in RESULTS and results != "format")


#: parts in their order, and what knows their names
_KNOWN: dict[str, Callable[[str], bool]] = {
    "loop": lambda name: name in LOOPS,
    "dialect": _is_dialect,
    "context": lambda name: strategy(name) is not None,
    "style": lambda name: name in STYLES,
}
_LISTED = {"loop": LOOPS, "dialect": DIALECTS, "context": CONTEXTS, "style": STYLES}


def _why(told: Scaffold, wrong: Sequence[str]) -> str:
    """Which parts are wrong, and ids with the nearest names in their places."""
    if not told.style:
        return " (an id is loop/dialect/context/style)"
    faults = ", ".join(f"no {part} {getattr(told, part)!r}" for part in wrong)
    found = [difflib.get_close_matches(getattr(told, part), list(_LISTED[part]), n=2, cutoff=0.4) for part in wrong]
    near = [replace(told, **dict(zip(wrong, names, strict=True))).id for names in itertools.product(*found)]
    return f" ({faults})" + (f"; near: {', '.join(near[:3])}" if near else "")


@cache
def zoo() -> tuple[str, ...]:
    """Ids of all combinations of the parts that are listed, in a stable order."""
    return tuple("/".join(parts) for parts in itertools.product(LOOPS, DIALECTS, CONTEXTS, STYLES))


@cache
def small() -> tuple[str, ...]:
    """Those of the zoo that are `is_small`."""
    return tuple(name for name in zoo() if get(name).is_small)


def select(patterns: Iterable[str]) -> list[str]:
    """Ids, patterns with * over the zoo, or `quickstart`, each once, in order. Raises ForgeError for what names none.

    A * stands for anything, so `react/*` is every scaffold of that loop.
    """
    return list(dict.fromkeys(name for pattern in patterns for name in _selected(pattern)))


def _selected(pattern: str) -> Iterable[str]:
    if pattern == QUICKSTART:
        return small()
    if "*" not in pattern:
        return [get(pattern).id]
    found = [name for name in zoo() if fnmatchcase(name, pattern.replace("[", "[[]"))]
    if not found:
        raise ForgeError(f"scaffolds {pattern!r}: no scaffold of the zoo is like this; `forge scaffolds` lists parts")
    return found


def drawn(weights: Mapping[str, float], key: str) -> Scaffold:
    """One of these ids, as often as they weigh: a pure function of the key."""
    at = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest()) / 2**48 * sum(weights.values())
    for name, weight in weights.items():
        at -= weight
        if at < 0:
            return get(name)
    return get(list(weights)[-1])  # a rounding error beyond the end


def combination(index: int, environments: Sequence[str]) -> tuple[Scaffold, str, int]:
    """(scaffold, environment, seed) number `index`: all pairs with seed 0, then all with seed 1, and so on without end.
    A seed's task is `domain.task(split, seed, 0)`."""
    seed, pair = divmod(index, len(zoo()) * len(environments))
    scaffold, environment = divmod(pair, len(environments))
    return get(zoo()[scaffold]), environments[environment], seed
