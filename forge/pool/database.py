"""The pool's SQLite file: one writer at a time, known schema, transactions, and faults told in one line.

The file is in WAL mode. `synchronous` is NORMAL: a transaction that has returned survives the death of the process,
kill -9 included, because its bytes are in the operating system. Against power loss, `transaction(power_safe=True)`
adds an fsync, which makes that transaction and everything before it durable.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from forge.types import ForgeError

SCHEMA = 2
APPLICATION = 0x46524745  # "FRGE"

_TABLES = (
    """CREATE TABLE items (
        position INTEGER PRIMARY KEY,
        state TEXT NOT NULL CHECK (state IN ('running', 'finished', 'taken', 'committed', 'published', 'dead')),
        domain TEXT NOT NULL,
        difficulty REAL NOT NULL,
        members INTEGER NOT NULL,
        task TEXT NOT NULL,
        served INTEGER NOT NULL,       -- committed items in the weights served when it was submitted
        attempt INTEGER NOT NULL,      -- 0, and one more each time a resumed life starts it again
        submitted_s REAL NOT NULL,
        finished_s REAL,               -- when it finished or died
        parked_s REAL,                 -- when it stepped aside as a straggler
        finish_order INTEGER,
        tokens INTEGER,
        reward REAL,
        death TEXT,
        taken_order INTEGER,           -- also the commit order: batches are committed as they were taken
        lag INTEGER,
        step INTEGER                   -- the trainer step it is leased to, then the one that committed it
    )""",
    # Two items can never hold the same place in the training order.
    "CREATE UNIQUE INDEX items_taken ON items (taken_order) WHERE taken_order IS NOT NULL",
    "CREATE INDEX items_step ON items (step) WHERE step IS NOT NULL",
    "CREATE TABLE trajectories (position INTEGER, member INTEGER, data BLOB NOT NULL, PRIMARY KEY (position, member))",
    "CREATE TABLE lives (life INTEGER PRIMARY KEY, resumed_s REAL NOT NULL, step INTEGER NOT NULL)",
    f"PRAGMA application_id = {APPLICATION}",
    f"PRAGMA user_version = {SCHEMA}",
)
#: what makes a pool of schema 1 one of this schema; read-only, it is read as it is
_UPGRADE = ("ALTER TABLE items ADD COLUMN parked_s REAL", f"PRAGMA user_version = {SCHEMA}")


class Database:
    """A connection that threads share. Opening a file that is absent or empty creates it, unless `read_only`.

    Raises ForgeError for a file that another process has open for writing, that is corrupt, or that is no pool of
    this schema. Readers need no lock and may come and go while a run writes.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.mutex = RLock()
        if read_only and not path.is_file():
            raise ForgeError(f"{path}: no pool here; give the pool file of a live run")
        if not path.parent.is_dir():
            raise ForgeError(f"{path.parent}: no such folder; the pool needs one to lie in")
        self._lock = None if read_only else _lock(path)
        try:
            self._connection = self._connect(read_only)
        except BaseException:
            if self._lock is not None:
                os.close(self._lock)
            raise

    def rows(self, sql: str, *args: object) -> list[tuple[Any, ...]]:
        with self.mutex, self._faults_named():
            return self._connection.execute(sql, args).fetchall()

    @contextmanager
    def transaction(self, *, power_safe: bool = False) -> Iterator[sqlite3.Connection]:
        """All or nothing. An exception inside rolls back and goes on."""
        with self.mutex, self._faults_named():
            connection = self._connection
            if power_safe:
                connection.execute("PRAGMA synchronous = FULL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            finally:
                if power_safe:
                    connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Fold the WAL into the file and let the next process in. May be called twice."""
        with self.mutex:
            self._connection.close()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        mode = "ro" if read_only else "rwc"
        with self._faults_named():
            connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection, read_only)
            except BaseException:
                connection.close()
                raise
        return connection

    def _prepare(self, connection: sqlite3.Connection, read_only: bool) -> None:
        def ask(sql: str) -> Any:
            return connection.execute(sql).fetchone()[0]

        schema, application = ask("PRAGMA user_version"), ask("PRAGMA application_id")
        empty = ask("SELECT count(*) FROM sqlite_master") == 0
        if not empty and application != APPLICATION:
            raise ForgeError(f"{self.path}: an SQLite file, but no Forge pool")
        if not empty and schema not in (1, SCHEMA):
            raise ForgeError(
                f"{self.path}: a pool of schema {schema}; this Forge reads schemas 1 and {SCHEMA}: "
                "go on with the Forge that made it, or start a new run"
            )
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            if empty or schema != SCHEMA:
                connection.execute("BEGIN IMMEDIATE")
                for statement in _TABLES if empty else _UPGRADE:
                    connection.execute(statement)
                connection.execute("COMMIT")
            fault = ask("PRAGMA quick_check(1)")
            if fault != "ok":
                raise sqlite3.DatabaseError(fault)

    @contextmanager
    def _faults_named(self) -> Iterator[None]:
        """SQLite's faults are the user's to mend (disk full, damaged file); a broken constraint is our bug."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.OperationalError as error:
            raise ForgeError(f"{self.path}: cannot read or write the pool: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ForgeError(
                f"{self.path}: the pool is damaged ({error}); restore the file from a backup, or start a new run"
            ) from error


def _lock(path: Path) -> int:
    """Hold `<path>.lock` for as long as this process lives; the kernel lets go when it is killed.

    A child made by fork would share the lock and keep it after its parent died, so children are spawned.
    """
    name = path.with_name(path.name + ".lock")
    handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, 32).decode().strip() or "of another run"
        os.close(handle)
        raise ForgeError(f"{path}: already open in process {holder}; wait for it to end, or stop it") from None
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle
