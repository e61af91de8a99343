"""Chains from what requests share: path compression over every request of a trace, known in advance.

Requests are added in order, each as so many blocks of which the first are an earlier one's. Blocks lie on *lines*: one
that begins where a line ends makes it longer, one that leaves it before its end begins another line there. Every
place where somebody left, or stopped short, before the line's end divides it. The parts between are the
chains of `sim.sessions`: no request but one that makes a chain longer, or finds it at its longest, ends inside it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from sim.sessions import Path

_NONE = -1  # the line of a request without blocks, and what a line at the root hangs on


class Prefixes:
    """Add every request first, then ask for paths. `ids`: numbers for chains, each used once."""

    def __init__(self, ids: Iterator[int]) -> None:
        self._ids = ids
        self._requests: list[tuple[int, int]] = []  # line, blocks
        self._up: list[int] = []  # of a line: the one it leaves
        self._bounds: list[list[int]] = []  # of a line: depths where chains begin; the first is where it leaves
        self._high: list[int] = []  # of a line: the depth it reaches
        self._chains: dict[tuple[int, int], int] = {}
        self._before: dict[int, Path] = {}

    def add(self, parent: int, shared: int, blocks: int) -> int:
        """A request of `blocks`, whose first `shared` are those of request `parent` (any number where `shared` is 0).

        Returns its number: 0, 1, ... ValueError: the parent is unknown, or either of the two is shorter than `shared`.
        """
        number = len(self._requests)
        if shared and not (0 <= parent < number and shared <= min(blocks, self._requests[parent][1])):
            raise ValueError(f"request {number} cannot share {shared} of {blocks} blocks with request {parent}")
        line = self._line(parent, shared)
        if line == _NONE or shared < self._high[line]:
            if line != _NONE and shared not in self._bounds[line]:
                insort(self._bounds[line], shared)
            if blocks > shared:
                line = self._new_line(line, shared)
        if line != _NONE:
            self._high[line] = max(self._high[line], blocks)
        self._requests.append((line, blocks))
        return number

    def path(self, number: int) -> Path:
        line, blocks = self._requests[number]
        return self._upto(line, blocks)

    def blocks(self, number: int) -> int:
        return self._requests[number][1]

    def shared(self, a: int, b: int) -> int:
        """Blocks that two requests begin with in common."""
        depths = dict(self._trail(a))
        return next((min(depth, depths[line]) for line, depth in self._trail(b) if line in depths), 0)

    def _trail(self, number: int) -> Iterator[tuple[int, int]]:
        """The lines of a request, the last first, each with the depth to which it takes it."""
        line, depth = self._requests[number]
        while line != _NONE:
            yield line, depth
            line, depth = self._up[line], self._bounds[line][0]

    def _line(self, request: int, shared: int) -> int:
        """The line that the last of a request's first `shared` blocks is on."""
        if not shared:
            return _NONE
        line = self._requests[request][0]
        while shared <= self._bounds[line][0]:
            line = self._up[line]
        return line

    def _new_line(self, up: int, low: int) -> int:
        self._up.append(up)
        self._bounds.append([low])
        self._high.append(low)
        return len(self._up) - 1

    def _upto(self, line: int, depth: int) -> Path:
        if line == _NONE:
            return ()
        if line not in self._before:
            self._before[line] = self._upto(self._up[line], self._bounds[line][0])
        bounds = self._bounds[line]
        pairs = []
        for low, high in zip(bounds, [*bounds[1:], depth], strict=True):
            if low >= depth:
                break
            pairs.append((self._chain(line, low), min(high, depth) - low))
        return self._before[line] + tuple(pairs)

    def _chain(self, line: int, low: int) -> int:
        key = (line, low)
        if key not in self._chains:
            self._chains[key] = next(self._ids)
        return self._chains[key]


class HashTrie:
    """Fills `Prefixes` from lists of block hashes. The same hash after another prefix is another block."""

    def __init__(self, prefixes: Prefixes) -> None:
        self.prefixes = prefixes
        self._children: dict[tuple[int, int], int] = {}
        self._owner = [0]  # of a node: a request whose blocks lead to it; node 0 is the root

    def add(self, hashes: Sequence[int]) -> int:
        """The request's number in `Prefixes`."""
        children, owner = self._children, self._owner
        node = shared = 0
        for digest in hashes:
            child = children.get((node, digest))
            if child is None:
                break
            node = child
            shared += 1
        number = self.prefixes.add(owner[node], shared, len(hashes))
        for digest in hashes[shared:]:
            children[node, digest] = node = len(owner)
            owner.append(number)
        return number


def with_answer(path: Path, following: Path, blocks: int) -> Path | None:
    """`path` with the chain last that the answer's `blocks` full blocks go on, as the next prompt's path has them.

    None where they do not all lie on one chain there: then the answer cannot be kept.
    """
    last = len(path) - 1
    if path and (len(following) <= last or following[:last] != path[:last] or following[last][0] != path[last][0]):
        return None
    grown = following[last][1] - path[last][1] if path else 0
    if grown:
        return path if blocks <= grown else None
    if len(following) <= last + 1 or blocks > following[last + 1][1]:
        return None
    return (*path, (following[last + 1][0], 0))
