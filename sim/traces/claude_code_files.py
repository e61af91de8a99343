"""The two forms of Claude Code traces (kv-cache-tester): `requests.csv` and whole sessions in JSON.

The CSV has no hashes, but of each request how many blocks it has in common with the previous one of its agent
(lcp_prev) and with the best earlier one of its session (lcp_best). Which one is best is not told: it is the previous
one where the two are equal, otherwise the latest of the same agent, or else of a sub-agent beside
it, or else of any, whose blocks agree with lcp_prev.

The JSON has hash ids. Their scope is `local`: the same id in two sessions is not the same block, so sessions share
nothing. Of another scope, sessions share what their ids say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, groupby
from pathlib import Path

from sim.traces.prefixes import HashTrie, Prefixes
from sim.traces.reading import Row, csv_rows, json_object, text_of

COLUMNS = ("trace", "agent", "t", "in", "out", "n_blocks", "lcp_prev", "lcp_best", "api_time")
CSV_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `number` in the session's prefixes; `agent` as a path, sub-agents below the agent they serve.

    `t`: seconds on the clock of its agent, which for a sub-agent may begin anywhere; `spawned`: when it began on the
    clock of the agent it serves, None where that is not told. `api_s`: seconds of its answer, None if unknown.
    """

    agent: str
    number: int
    t: float
    spawned: float | None
    prompt: int
    output: int
    api_s: float | None


@dataclass(frozen=True, slots=True)
class Recording:
    """One session as a file has it, its requests in the file's order."""

    name: str
    block: int
    asks: tuple[Ask, ...]
    prefixes: Prefixes


def read(path: Path) -> list[Recording]:
    """Every session of requests.csv, of one JSON file, or of a folder of either. Raises ForgeError."""
    if path.is_dir():
        table = path / "requests.csv"
        return read(table) if table.is_file() else _from_json(sorted(path.glob("*.json")))
    return _from_json([path]) if path.suffix == ".json" else _from_csv(path)


def _ask(row: Row, agent: str, number: int, spawned: float | None) -> Ask:
    """A request that was cut off before its first token counts as one token."""
    return Ask(
        agent=agent,
        number=number,
        t=row.number("t"),
        spawned=spawned,
        prompt=row.integer("in", 1),
        output=max(1, row.integer("out")),
        api_s=row.optional("api_time"),
    )


# --- requests.csv ------


def _from_csv(path: Path) -> list[Recording]:
    ids = count()
    recordings = []
    for name, rows in groupby(csv_rows(path, COLUMNS), key=lambda row: row.text("trace")):
        prefixes = Prefixes(ids)
        asks: list[Ask] = []
        latest: dict[str, int] = {}
        for row in rows:
            agent = row.text("agent")
            latest[agent] = _link(row, prefixes, asks, latest.get(agent))
            asks.append(_ask(row, agent, latest[agent], None))
        recordings.append(Recording(name, CSV_BLOCK, tuple(asks), prefixes))
    return recordings


def _link(row: Row, prefixes: Prefixes, asks: list[Ask], last: int | None) -> int:
    """Add the request that comes after `asks`, `last` of which is its agent's."""
    blocks, common, best = (row.integer(key) for key in ("n_blocks", "lcp_prev", "lcp_best"))
    if blocks > row.integer("in", 1) // CSV_BLOCK:
        raise row.wrong("n_blocks", f"more full blocks of {CSV_BLOCK} than the {row.values['in']} tokens of `in` have")
    if not common <= best <= blocks:
        raise row.wrong("lcp_best", f"must lie between lcp_prev = {common} and n_blocks = {blocks}")
    if common > (0 if last is None else prefixes.blocks(last)):
        raise row.wrong("lcp_prev", "more blocks than the previous request of this agent has")
    if best == common:
        return prefixes.add(last or 0, common, blocks)
    for other in _likely(row.text("agent"), asks):
        if prefixes.blocks(other) >= best and (last is None or prefixes.shared(other, last) == common):
            return prefixes.add(other, best, blocks)
    raise row.wrong("lcp_best", f"no earlier request of this session has {best} blocks and agrees with lcp_prev")


def _likely(agent: str, asks: list[Ask]) -> list[int]:
    """Earlier requests, those first whose prompts are likely to begin as this agent's: its own, then its peers'."""
    depth = agent.count("/")
    ordered = sorted(asks, key=lambda ask: (ask.agent != agent, ask.agent.count("/") != depth, -ask.number))
    return [ask.number for ask in ordered]


# --- whole sessions ------


def _from_json(paths: list[Path]) -> list[Recording]:
    ids = count()
    scopes: dict[tuple[str, int], HashTrie] = {}
    recordings = []
    for path in paths:
        whole = json_object(str(path), text_of(path))
        scope, block = whole.text("hash_id_scope"), whole.integer("block_size", 1)
        key = (str(path) if scope == "local" else scope, block)
        trie = scopes.setdefault(key, HashTrie(Prefixes(ids)))
        asks = tuple(_asks(whole, "main", None, trie, block))
        recordings.append(Recording(whole.text("id"), block, asks, trie.prefixes))
    return recordings


def _asks(whole: Row, agent: str, spawned: float | None, trie: HashTrie, block: int) -> Iterator[Ask]:
    """Requests of one agent, those of its sub-agents in between."""
    entries = whole.values.get("requests")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise whole.wrong("requests", "must be a list of objects")
    for place, values in enumerate(entries):
        row = Row(f"{whole.where}: requests[{place}]", values)
        if values.get("type") == "subagent":
            yield from _asks(row, f"{agent}/{row.text('agent_id')}", row.number("t"), trie, block)
            continue
        hashes = row.integers("hash_ids")[: row.integer("in", 1) // block]
        yield _ask(row, agent, trie.add(hashes), spawned)
