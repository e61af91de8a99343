"""Python's collector of cycles, asked to look seldom: little of a simulation is garbage that only it can find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG = 500_000  # new objects before it looks


@contextmanager
def seldom() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(max(_YOUNG, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
