"""Which problems belong to which split, and the pure draw that respects it.

Membership is a hash of the problem itself, so a problem met in training can never be met in evaluation, whatever
the seed: 80% train, 10% validation (tune on it), 10% held out (never looked at when choosing anything).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from forge.domains.base import Split, Task

_BUCKETS = 10
_MAX_DRAWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A drawn problem before it is given to a split. `problem` is its identity: equal problems are the same one."""

    problem: str
    prompt: str
    difficulty: float
    data: Mapping[str, Any]


def split_of(domain: str, problem: str) -> Split:
    """The split that owns `problem`: crc32 is stable over processes and Python versions, unlike hash()."""
    bucket = zlib.crc32(f"{domain}:{problem}".encode()) % _BUCKETS
    return "held_out" if bucket == 0 else "validation" if bucket == 1 else "train"


def draw_task(
    domain: str, split: Split, seed: int, index: int, draft: Callable[[Random], Draft], *, system: str = ""
) -> Task:
    """Redraw from a generator seeded by the arguments alone until the problem belongs to `split`."""
    rng = Random(f"{domain}/{split}/{seed}/{index}")
    for _ in range(_MAX_DRAWS):
        drawn = draft(rng)
        if split_of(domain, drawn.problem) == split:
            return Task(
                id=f"{split}/{seed}/{index}",
                domain=domain,
                system=system,
                prompt=drawn.prompt,
                difficulty=drawn.difficulty,
                data={**drawn.data, "problem": drawn.problem},
            )
    raise AssertionError(f"domain {domain!r}: no {split} problem in {_MAX_DRAWS} draws; it has too few problems")
