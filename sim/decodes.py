"""The decoding requests of an instance: when each ends, and how many KV blocks they take as they grow together.

All of them sample at one pace, so one count, `done`, serves them all: a request that joined with `kv` units holds
`phase + done` with a constant `phase`, and ends when `done` reaches its `finish`. Units are tokens, or fractions of
one where speculation makes a step yield a fraction (`unit` of them are a token).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from sim.request import Request

NEVER = 1 << 200


class Decodes:
    """`count` requests with `context` units of KV together; the first ends at `next_end`. `span`: units of a block.

    `bound`: private blocks they hold at `at`, or, unless `exact`, a few more.
    """

    __slots__ = (
        "_phases",
        "_quotient",
        "_rows",
        "at",
        "bound",
        "context",
        "count",
        "done",
        "exact",
        "next_end",
        "span",
        "unit",
    )

    def __init__(self, block: int, unit: int) -> None:
        self.unit = unit
        self.span = block * unit
        self.done = 0
        self.count = 0
        self.context = 0
        self.next_end = NEVER
        self._rows: list[tuple[int, int, Request]] = []  # heap: (finish, order, request)
        self._phases: dict[int, int] = {}  # phase % span -> how many
        self._quotient = 0  # sum of phase // span, less the blocks they share
        self.bound = 0
        self.at = 0
        self.exact = True

    def join(self, request: Request) -> None:
        """With `request.kv` tokens and `share` shared blocks, `sampled` of `output` tokens done."""
        kv, done, span = request.kv * self.unit, self.done, self.span
        request.phase = phase = kv - done
        request.finish = finish = done + (request.output - request.sampled) * self.unit
        request.blocks = -(-kv // span) - request.share
        rest = phase % span
        self._quotient += phase // span - request.share
        self._phases[rest] = self._phases.get(rest, 0) + 1
        self.bound += request.blocks
        if self.at > done:  # looked at for an iteration that this one was not part of
            self.at, self.exact = done, False
        self.exact = self.exact and self.at == done
        self.count += 1
        self.context += kv
        heappush(self._rows, (finish, request.order, request))
        if finish < self.next_end:
            self.next_end = finish

    def _leave(self, request: Request) -> None:
        """Sets `sampled` and `kv` to what it has."""
        phase, done, span = request.phase, self.done, self.span
        rest = phase % span
        self._quotient -= phase // span - request.share
        if self._phases[rest] == 1:
            del self._phases[rest]
        else:
            self._phases[rest] -= 1
        if self.exact and self.at == done:
            self.bound -= -(-(phase + done) // span) - request.share
        else:
            self.bound -= request.blocks
            self.exact = False
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
        """Blocks of their own that they hold at `done`; remembered as the bound."""
        if done != self.at or not self.exact:
            span, taken = self.span, self._quotient
            for rest, count in self._phases.items():
                taken -= count * (-(rest + done) // span)
            self.bound, self.at, self.exact = taken, done, True
        return self.bound
