"""Azure LLM inference traces: CSV of TIMESTAMP (UTC), ContextTokens, GeneratedTokens.

Requests are independent, and what they share is not told: each is a session of one step whose path is empty. A request
that generated nothing counts as one token.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from sim.sessions import Session, Step
from sim.traces.reading import Recorded, Row, block_size, csv_rows, positive, recorded

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def load(path: Path, speed: float = 1.0, block: int = 16) -> Recorded:
    """`speed`: arrivals come that many times as fast. `block`: tokens, for whoever replays it. Raises ForgeError."""
    positive("speed", speed)
    block_size(block)
    rows = [(_seconds(row), row) for row in csv_rows(path, COLUMNS)]
    first = min((t for t, _ in rows), default=0.0)
    sessions = (
        Session(name=f"request {i}", start_s=(t - first) / speed, steps=(_step(row),))
        for i, (t, row) in enumerate(rows)
    )
    return recorded(path, block, sessions)


def _seconds(row: Row) -> float:
    text = row.text("TIMESTAMP")
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise row.wrong("TIMESTAMP", "must be a time such as 2023-11-16 18:17:03.9799600") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _step(row: Row) -> Step:
    return Step(prompt=row.integer("ContextTokens", 1), output=max(1, row.integer("GeneratedTokens")))
