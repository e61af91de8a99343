"""Retries: a client that lost an answer and asks again gets that answer, not a new sample.

A request joins only if it is marked as a retry (`x-stainless-retry-count` above 0) and its body is byte for byte
that of a generation of the same trajectory and protocol that is in flight, or whose answer nobody received in full.
Any other identical body is a new sample: agents do ask the same thing twice on purpose.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Joinable(Protocol):
    """A generation that may have several waiters."""

    @property
    def failed(self) -> bool:
        """True if it ended without an answer; asking again must then generate again."""
        ...

    def cancel(self) -> None: ...


T = TypeVar("T", bound=Joinable)
#: trajectory, dialect, body
Key = tuple[str, str, bytes]


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """A generation and how many requests wait for it. `waiters == 0` means orphaned, and soon cancelled."""

    key: Key
    flight: T
    waiters: int = 1
    expiry: asyncio.TimerHandle | None = None


class Retries(Generic[T]):
    """Generations whose answer may still be asked for. Bounded: an orphan lives `grace_s`, then it is cancelled.

    The grace is there because an SDK closes its socket on a timeout and asks again half a second later. Clients
    that never mark retries get none: their hanging up cancels at once.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._open: dict[Key, list[Ticket[T]]] = {}

    def join(self, key: Key) -> Ticket[T] | None:
        """Wait for the generation a marked retry means: the oldest with the fewest waiters, an orphan if any."""
        tickets = [ticket for ticket in self._open.get(key, ()) if not ticket.flight.failed]
        if not tickets:
            return None
        ticket = min(tickets, key=lambda t: t.waiters)
        ticket.waiters += 1
        if ticket.expiry:
            ticket.expiry.cancel()
        return ticket

    def add(self, key: Key, flight: T) -> Ticket[T]:
        """A new sample, with its first waiter."""
        ticket = Ticket(key, flight)
        self._open.setdefault(key, []).append(ticket)
        return ticket

    def leave(self, ticket: Ticket[T], *, delivered: bool, may_retry: bool) -> None:
        """A waiter goes: with the whole answer, or without, perhaps to come back."""
        ticket.waiters -= 1
        if delivered:
            self._drop(ticket)
        elif not ticket.waiters:
            patient = may_retry and self._grace_s > 0 and not ticket.flight.failed
            if patient and ticket in self._open.get(ticket.key, ()):
                loop = asyncio.get_running_loop()
                ticket.expiry = loop.call_later(self._grace_s, self._expire, ticket)
            else:
                self._expire(ticket)

    def forget(self, trajectory: str) -> None:
        """The trajectory is over: cancel what it still generates."""
        self._cancel([key for key in self._open if key[0] == trajectory])

    def close(self) -> None:
        """Cancel everything."""
        self._cancel(list(self._open))

    def _cancel(self, keys: list[Key]) -> None:
        for ticket in [ticket for key in keys for ticket in self._open[key]]:
            self._expire(ticket)

    def _expire(self, ticket: Ticket[T]) -> None:
        if ticket.expiry:
            ticket.expiry.cancel()
        self._drop(ticket)
        ticket.flight.cancel()

    def _drop(self, ticket: Ticket[T]) -> None:
        tickets = self._open.get(ticket.key, [])
        if ticket in tickets:
            tickets.remove(ticket)
            if not tickets:
                del self._open[ticket.key]
