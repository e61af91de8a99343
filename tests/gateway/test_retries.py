"""Who may join which generation, and when an orphan ends."""

from __future__ import annotations

import asyncio

from forge.gateway.retries import Retries

KEY = ("t", "chat", b"body")


class Flight:
    def __init__(self) -> None:
        self.failed = False
        self.cancelled = 0

    def cancel(self) -> None:
        self.cancelled += 1


async def test_an_orphan_is_joined_and_its_clock_starts_again() -> None:
    retries, flight = Retries[Flight](0.3), Flight()
    ticket = retries.add(KEY, flight)
    retries.leave(ticket, delivered=False, may_retry=True)
    await asyncio.sleep(0.2)
    assert retries.join(KEY) is ticket
    retries.leave(ticket, delivered=False, may_retry=True)
    await asyncio.sleep(0.2)
    assert not flight.cancelled
    assert retries.join(KEY) is ticket
    retries.leave(ticket, delivered=True, may_retry=True)
    assert retries.join(KEY) is None
    await asyncio.sleep(0.4)
    assert not flight.cancelled


async def test_an_orphan_nobody_asks_for_is_cancelled() -> None:
    retries, patient, hasty = Retries[Flight](0.02), Flight(), Flight()
    retries.leave(retries.add(KEY, hasty), delivered=False, may_retry=False)
    assert hasty.cancelled
    retries.leave(retries.add(KEY, patient), delivered=False, may_retry=True)
    assert not patient.cancelled
    await asyncio.sleep(0.05)
    assert patient.cancelled
    assert retries.join(KEY) is None


async def test_only_the_same_body_of_the_same_trajectory() -> None:
    retries = Retries[Flight](1.0)
    retries.add(KEY, Flight())
    assert retries.join(("t", "chat", b"other")) is None
    assert retries.join(("u", "chat", b"body")) is None
    assert retries.join(("t", "messages", b"body")) is None


async def test_orphans_first_failures_never() -> None:
    retries = Retries[Flight](1.0)
    busy, orphan, failed = (retries.add(KEY, Flight()) for _ in range(3))
    retries.leave(orphan, delivered=False, may_retry=True)
    failed.flight.failed = True
    assert retries.join(KEY) is orphan
    assert retries.join(KEY) is busy
    retries.forget("t")
    assert all(ticket.flight.cancelled for ticket in (busy, orphan, failed))
    assert retries.join(KEY) is None


async def test_a_second_waiter_keeps_it_alive() -> None:
    retries, flight = Retries[Flight](0.0), Flight()
    ticket = retries.add(KEY, flight)
    assert retries.join(KEY) is ticket
    retries.leave(ticket, delivered=False, may_retry=True)
    assert not flight.cancelled
    retries.leave(ticket, delivered=False, may_retry=True)
    assert flight.cancelled
