"""The database of work that waits: SQLite in WAL mode, which several API processes read and write at once.

A transaction is there as a whole or not at all, whenever a process is killed. Every function blocks: call
them in threads. Errors of the disk are raised as OSError, as those of files are.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAME = "work.sqlite"
_WAIT_SECONDS = 30.0
"""Seconds that a transaction waits for those of other processes."""
_VACUUM_PAGES = 500
"""Free pages that are given back to the disk at a time, while nobody else can write."""
_FULL_BYTES = 1 << 20
"""If the disk has less room than this, it is what a write failed of."""

_SCHEMAS = (
    """
CREATE TABLE files (
  id TEXT PRIMARY KEY, owner TEXT, at REAL, bytes INTEGER, checksum INTEGER, filename TEXT, purpose TEXT,
  expires_at INTEGER);
CREATE INDEX files_by_owner ON files (owner, at);
CREATE TABLE batches (
  id TEXT PRIMARY KEY, owner TEXT, at REAL, input_file_id TEXT, record BLOB, state BLOB,
  completed INTEGER DEFAULT 0, failed INTEGER DEFAULT 0, cancelled_at INTEGER, ended_at REAL);
CREATE INDEX batches_by_owner ON batches (owner, at);
CREATE INDEX batches_to_do ON batches (input_file_id) WHERE ended_at IS NULL;
CREATE TABLE lines (
  batch TEXT, number INTEGER, custom_id TEXT, place INTEGER, bytes INTEGER, checksum INTEGER,
  PRIMARY KEY (batch, number)) WITHOUT ROWID;
CREATE TABLE results (
  place INTEGER PRIMARY KEY, batch TEXT, number INTEGER, failed INTEGER, line BLOB, UNIQUE (batch, number));
CREATE INDEX results_by_kind ON results (batch, failed);
CREATE TABLE responses (
  number INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT, id TEXT, at REAL, waits INTEGER, streams INTEGER,
  expires_at REAL, input BLOB, answer BLOB, request BLOB, UNIQUE (owner, id));
CREATE INDEX responses_by_age ON responses (owner, waits, at);
CREATE INDEX responses_to_do ON responses (at) WHERE waits;
CREATE INDEX responses_by_end ON responses (expires_at) WHERE NOT waits;
CREATE TABLE events (
  response INTEGER REFERENCES responses ON DELETE CASCADE, number INTEGER, kind TEXT, event BLOB,
  PRIMARY KEY (response, number)) WITHOUT ROWID;
""",
    """
CREATE TABLE conversations (
  id TEXT PRIMARY KEY, owner TEXT, at REAL, used_at REAL, metadata BLOB);
CREATE INDEX conversations_by_owner ON conversations (owner);
CREATE INDEX conversations_by_use ON conversations (used_at);
CREATE TABLE items (
  number INTEGER PRIMARY KEY, conversation TEXT REFERENCES conversations ON DELETE CASCADE,
  id TEXT, item BLOB, UNIQUE (conversation, id));
""",
)
"""What each version of the database has more than the one before."""


class Damaged(OSError):
    """Data on the disk are not what was written there. The message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)
        self.message = message


class Database:
    """Opens the file when it is used first. One connection reads, and another one writes meanwhile."""

    def __init__(self, path: Path, before_open: Callable[[], None]) -> None:
        """`before_open` is called once, before the file is opened, or made if there is none."""
        self.path = path
        self._before_open = before_open
        self._opening, self._reading, self._writing = threading.Lock(), threading.Lock(), threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._durable: bool | None = None
        """Whether transactions of the writer are durable now; it is not known of one that was just opened."""

    def open(self) -> None:
        """Open the file, or make it."""
        with self._errors():
            self._open()

    def read(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """The rows of a query; none at all, if nothing was ever written."""
        if self._reader is None and not self.path.exists():
            return []
        with self._errors():
            reader, _ = self._open()
            with self._reading:
                return reader.execute(sql, values).fetchall()

    @contextmanager
    def write(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """A transaction. If it is `durable`, it is on the disk afterwards; otherwise it outlives the process,
        but perhaps not the machine."""
        with self._errors():
            _, writer = self._open()
            with self._writing:
                if durable != self._durable:
                    writer.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                    self._durable = durable
                writer.execute("BEGIN IMMEDIATE")
                try:
                    yield writer
                    writer.execute("COMMIT")
                finally:
                    if writer.in_transaction:
                        writer.execute("ROLLBACK")

    def clean(self, table: str, which: str, *values: object) -> None:
        """Delete rows, if there are any: to look for them costs less than a transaction."""
        if self.read(f"SELECT 1 FROM {table} WHERE {which} LIMIT 1", *values):
            with self.write(durable=False) as writer:
                writer.execute(f"DELETE FROM {table} WHERE {which}", values)

    def used_bytes(self) -> int:
        """The bytes of the database that hold something."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (sum(row[0] for row in self.read(f"PRAGMA {name}")) for name in names)
        return (pages - free) * size

    def vacuum(self) -> None:
        """Give room that is free in the file back to the disk."""
        while self.read("PRAGMA freelist_count")[0][0]:
            with self.write(durable=False) as writer:
                writer.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()

    def close(self) -> None:
        with self._opening, self._reading, self._writing:
            for each in (self._reader, self._writer):
                if each is not None:
                    each.close()
            self._reader = self._writer = self._durable = None

    def _open(self) -> tuple[sqlite3.Connection, sqlite3.Connection]:
        with self._opening:
            if self._reader is None or self._writer is None:
                self._before_open()
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # for nobody else
                writer = self._connect()
                self._make_tables(writer)
                self._writer, self._reader = writer, self._connect()
            return self._reader, self._writer

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(
            self.path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        made.row_factory = sqlite3.Row
        made.text_factory = lambda data: data.decode("utf-8", "replace")  # a damaged name is still a name
        made.execute("PRAGMA foreign_keys = ON")
        return made

    def _make_tables(self, writer: sqlite3.Connection) -> None:
        writer.execute("PRAGMA auto_vacuum = INCREMENTAL")
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("PRAGMA journal_size_limit = 67108864")
        if self._version(writer) < len(_SCHEMAS):
            writer.execute("BEGIN IMMEDIATE")
            for schema in _SCHEMAS[self._version(writer) :]:  # other processes may have made them meanwhile
                for statement in schema.split(";\n"):
                    writer.execute(statement)
            writer.execute(f"PRAGMA user_version = {len(_SCHEMAS)}")
            writer.execute("COMMIT")
        elif self._version(writer) > len(_SCHEMAS):
            raise Damaged(f"{self.path} is of another version of Facet, or no database of it")

    def _version(self, writer: sqlite3.Connection) -> Any:
        return writer.execute("PRAGMA user_version").fetchone()[0]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns SQLite's errors of the disk into those that files have."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = error.sqlite_errorcode & 0xFF if hasattr(error, "sqlite_errorcode") else 0
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise Damaged(f"the database {self.path} is damaged ({error})") from error
            if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and self._disk_is_full()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path)) from error
            kinds = {
                sqlite3.SQLITE_IOERR: errno.EIO,
                sqlite3.SQLITE_BUSY: errno.EBUSY,
                sqlite3.SQLITE_READONLY: errno.EROFS,
                sqlite3.SQLITE_CANTOPEN: errno.EACCES,
            }
            if code in kinds:
                raise OSError(kinds[code], f"{os.strerror(kinds[code])} ({error})", str(self.path)) from error
            raise

    def _disk_is_full(self) -> bool:
        found = os.statvfs(self.path.parent)
        return found.f_bavail * found.f_frsize < _FULL_BYTES
