"""Mooncake traces: JSON lines of timestamp (ms), input_length, output_length (tokens), hash_ids (one a block).

Requests are independent: each is a session of one step at its timestamp. Hash ids are compressed over the whole trace
(`prefixes`), so that a request has a few chains. The last hash id may stand for a block that is not full: it is no part
of the path. Which request is another's next turn is not told, so no answer is kept: what a later prompt
repeats of an earlier answer is in its hash ids. A request without a time from 0 on, a prompt, an answer and hash ids is
refused: the published traces have none.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from sim.sessions import Session, Step
from sim.traces.prefixes import HashTrie, Prefixes
from sim.traces.reading import Recorded, Row, block_size, json_rows, positive, recorded


def load(path: Path, speed: float = 1.0, block: int = 512) -> Recorded:
    """`speed`: arrivals come that many times as fast. `block`: tokens a hash id stands for. Raises ForgeError."""
    positive("speed", speed)
    block_size(block)
    rows = sorted((_arrival_ms(row), i, row) for i, row in enumerate(json_rows(path)))
    prefixes = Prefixes(count())
    trie = HashTrie(prefixes)
    requests = [(row, t, trie.add(_blocks(row, block))) for t, _, row in rows]
    first = rows[0][0] if rows else 0.0
    sessions = (
        Session(
            name=f"request {number}",
            start_s=(t - first) / 1000.0 / speed,
            steps=(_step(row, prefixes, number),),
        )
        for row, t, number in requests
    )
    return recorded(path, block, sessions)


def _arrival_ms(row: Row) -> float:
    found = row.number("timestamp")
    if found < 0:
        raise row.wrong("timestamp", "must be milliseconds, 0 or more")
    return found


def _blocks(row: Row, block: int) -> list[int]:
    """Hash ids of the full blocks."""
    full = row.integer("input_length", 1) // block
    hashes = row.integers("hash_ids")
    if len(hashes) < full:
        raise row.wrong("hash_ids", f"{len(hashes)} of them, but the prompt has {full} full blocks of {block} tokens")
    return hashes[:full]


def _step(row: Row, prefixes: Prefixes, number: int) -> Step:
    prompt, output = row.integer("input_length", 1), row.integer("output_length", 1)
    return Step(prompt=prompt, output=output, path=prefixes.path(number))
