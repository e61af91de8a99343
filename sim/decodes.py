"""The decoding requests of an instance: when each ends, and how many KV blocks they take as they grow together.

All of them sample at one pace, so one count, `done`, serves them all: a request that joined with `kv` units holds
`phase + done` with a constant `phase`, and ends when `done` reaches its `finish`. Units are tokens, or fractions of
one where speculation makes a step yield a fraction (`unit` of them are a token).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush

from sim.request import Request

NEVER = 1 << 200


class Decodes:
    """`count` requests with `context` units of KV together; the first ends at `next_end`. `span`: units of a block.

    `held`: private blocks they hold when `at` units are done, and all the way to `until`, exclusive.
    """

    __slots__ = (
        "_quotient",
        "_rests",
        "_rows",
        "at",
        "context",
        "count",
        "done",
        "held",
        "next_end",
        "span",
        "unit",
        "until",
    )

    def __init__(self, block: int, unit: int) -> None:
        self.unit = unit
        self.span = block * unit
        self.done = 0
        self.count = 0
        self.context = 0
        self.next_end = NEVER
        self._rows: list[tuple[int, int, Request]] = []  # heap: (finish, order, request)
        self._rests: list[int] = []  # phase % span of each, sorted
        self._quotient = 0  # sum of phase // span, less the blocks they share
        self.held = 0
        self.at = 0
        self.until = NEVER

    def join(self, request: Request) -> None:
        """With `request.kv` tokens and `share` shared blocks, `sampled` of `output` tokens done."""
        kv, done, span = request.kv * self.unit, self.done, self.span
        request.phase = phase = kv - done
        request.finish = finish = done + (request.output - request.sampled) * self.unit
        self._quotient += phase // span - request.share
        insort(self._rests, phase % span)
        blocks = -(-(phase + self.at) // span)
        self.held += blocks - request.share
        until = blocks * span - phase + 1
        if until < self.until:
            self.until = until
        self.count += 1
        self.context += kv
        heappush(self._rows, (finish, request.order, request))
        if finish < self.next_end:
            self.next_end = finish

    def _leave(self, request: Request) -> None:
        """Sets `sampled` and `kv` to what it has."""
        phase, done, span = request.phase, self.done, self.span
        self._quotient -= phase // span - request.share
        del self._rests[bisect_left(self._rests, phase % span)]
        self.held -= -(-(phase + self.at) // span) - request.share
        self.count -= 1
        self.context -= phase + done
        left = request.finish - done
        request.sampled = request.output - (-(-left // self.unit) if left > 0 else 0)  # whole tokens
        request.kv = request.prompt + request.sampled - 1

    def ended(self) -> list[Request]:
        """Those that have sampled all, in order of admission; they leave."""
        out: list[Request] = []
        rows, done = self._rows, self.done
        while rows and rows[0][0] <= done:
            request = heappop(rows)[2]
            self._leave(request)
            out.append(request)
        self.next_end = rows[0][0] if rows else NEVER
        if len(out) > 1:
            out.sort(key=lambda request: request.order)
        return out

    def all(self) -> list[Request]:
        """In order of admission."""
        return [request for _, _, request in sorted(self._rows, key=lambda row: row[1])]

    def remove(self, request: Request) -> None:
        """It leaves before its end."""
        self._leave(request)
        self._rows = rows = [row for row in self._rows if row[2] is not request]
        heapify(rows)
        self.next_end = rows[0][0] if rows else NEVER

    def private(self, done: int) -> int:
        """Blocks of their own that they hold at `done`."""
        if self.at <= done < self.until:
            return self.held
        # One whose phase leaves `rest` holds ceil((rest + done) / span) beside its quotient: as many as `done` fills,
        # one more where it has begun another, and one more where the two rests together exceed a block.
        rests, count = self._rests, self.count
        filled, rest = divmod(done, self.span)
        begun = count if rest else count - bisect_right(rests, 0)
        return self._quotient + count * filled + begun + count - bisect_right(rests, self.span - rest)

    def settle(self, done: int) -> int:
        """The same; `held`, `at` and `until` are about `done` from now on."""
        if not self.at <= done < self.until:
            self.held, self.at = self.private(done), done
            rests, span = self._rests, self.span
            if rests:
                full = -done % span  # the rest whose last block is full now; the next to fill is the largest below it
                self.until = done + 1 + (full - rests[bisect_right(rests, full) - 1]) % span
            else:
                self.until = NEVER
        return self.held
