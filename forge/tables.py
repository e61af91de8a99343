"""`requests.parquet` and `items.parquet`: the rows of `forge.metrics.rows` on disk, units in the columns' metadata.

Written as a stream, so that a run's length costs disk and not memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from forge import trace as ev
from forge.metrics.rows import ItemRow, RequestRow, TableFold
from forge.temporary import temporary_for
from forge.types import ForgeError

ROWS = 50_000  # of a row group, and events between two looks at what is complete: what waits in memory

TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()

#: column -> type, unit, what it says
REQUESTS = {
    "request": (TEXT, "", "its name, unique in a life"),
    "position": (WHOLE, "", "of its item"),
    "member": (WHOLE, "", "of the item's group"),
    "turn": (WHOLE, "", "of the member's conversation"),
    "domain": (TEXT, "", "of its item"),
    "instance": (WHOLE, "", "that served it"),
    "item_submitted_s": (REAL, "s", "its item got its position"),
    "routed_s": (REAL, "s", "it was sent to the instance"),
    "first_token_s": (REAL, "s", "its first token was sampled"),
    "completed_s": (REAL, "s", "it left the instance"),
    "prompt_tokens": (WHOLE, "tokens", "of its prompt"),
    "cached_tokens": (WHOLE, "tokens", "of its prompt that the instance was believed to hold"),
    "tokens": (WHOLE, "tokens", "sampled"),
    "ttft_s": (REAL, "s", "first_token_s - routed_s"),
    "tpot_s": (REAL, "s", "(completed_s - first_token_s) / (tokens - 1)"),
    "finish": (TEXT, "", "why it ended; null: the trace does not say"),
    "version_first": (WHOLE, "steps", "trainer step of the weights that sampled its first token"),
    "version_last": (WHOLE, "steps", "of those that sampled its last"),
}

ITEMS = {
    "position": (WHOLE, "", "in the queue"),
    "domain": (TEXT, "", ""),
    "difficulty": (REAL, "", "as the domain declares it"),
    "members": (WHOLE, "", "of its group"),
    "survivors": (WHOLE, "", "members that ended with a reward"),
    "state": (TEXT, "", "where the trace ends"),
    "submitted_s": (REAL, "s", "it got its position"),
    "finished_s": (REAL, "s", "its last member ended"),
    "taken_s": (REAL, "s", "into a training batch"),
    "committed_s": (REAL, "s", "the checkpoint that holds it was durable"),
    "published_s": (REAL, "s", "the slowest live instance served weights that hold it"),
    "dead_s": (REAL, "s", "it died"),
    "death_reason": (TEXT, "", "why it died"),
    "step": (WHOLE, "steps", "trainer step that trained on it"),
    "lag_items": (WHOLE, "items", "taken after the weights served at its submission and before it"),
    "lag_versions": (WHOLE, "steps", "step - 1 - version_first: how old the oldest weights in it were when trained on"),
    "version_first": (WHOLE, "steps", "trainer step of the oldest weights that sampled a token of it"),
    "version_last": (WHOLE, "steps", "of the newest"),
    "tokens": (WHOLE, "tokens", "sampled; of a dead item until it died"),
    "reward": (REAL, "", "mean of its survivors"),
}

Columns = dict[str, tuple[pa.DataType, str, str]]


class Table:
    """One Parquet file, appended to in row groups; it takes its name only when closed, so that no half is ever read."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self.path = path
        self._columns = columns
        self._schema = pa.schema(
            pa.field(name, kind, metadata={"unit": unit, "what": what}) for name, (kind, unit, what) in columns.items()
        )
        self._rows: list[RequestRow | ItemRow] = []
        self._temporary = temporary_for(path)
        try:
            self._writer = pq.ParquetWriter(self._temporary, self._schema, compression="zstd")
        except OSError as error:
            raise ForgeError(f"{path.parent}: cannot be written: {os.strerror(error.errno or 0)}") from None

    def extend(self, rows: Sequence[RequestRow | ItemRow]) -> None:
        self._rows += rows
        if len(self._rows) >= ROWS:
            self._flush()

    def _flush(self) -> None:
        columns = {name: [getattr(row, name) for row in self._rows] for name in self._columns}
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._rows.clear()

    def close(self, *, keep: bool) -> None:
        if keep:
            self._flush()
        self._writer.close()
        os.replace(self._temporary, self.path) if keep else self._temporary.unlink()


class TableWriter:
    """A sink of events that writes both tables into a folder. What came before an error in its block is dropped."""

    def __init__(self, folder: Path) -> None:
        self._fold = TableFold()
        self._events = 0
        self._requests = Table(folder / "requests.parquet", REQUESTS)
        self._items = Table(folder / "items.parquet", ITEMS)

    def __call__(self, event: ev.Event) -> None:
        self._fold.apply(event)
        self._events += 1
        if self._events % ROWS == 0:
            self._extend(*self._fold.drain())

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._extend(*self._fold.rest())
        self._requests.close(keep=kind is None)
        self._items.close(keep=kind is None)

    def _extend(self, requests: Sequence[RequestRow], items: Sequence[ItemRow]) -> None:
        self._requests.extend(requests)
        self._items.extend(items)


def write_tables(events: Iterable[ev.Event], folder: Path) -> list[Path]:
    """Both tables of a whole trace; returns their paths."""
    with TableWriter(folder) as tables:
        for event in events:
            tables(event)
    return [folder / "requests.parquet", folder / "items.parquet"]
