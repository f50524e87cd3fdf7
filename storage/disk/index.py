"""What lies where on disk, in a SQLite database beside the segments.

SQLite rather than a log of our own: its recovery has been proven by far more crashes than ours ever will be. WAL mode,
so that a commit is one append; synchronous=NORMAL, with which a commit waits for no device and a checkpoint alone does,
so that a loss of power costs the last commits but never the database; and FULL for the one commit that `apply` is asked
to make durable. The tier holds every row in memory as well and reads this once, at start; what changes is handed over
in batches by a thread that may block.

A batch is all or nothing, and batches take effect in their order. That is what the tier's promise rests on: the row of
a block that has left is gone before other bytes are written over its record, and a block that is renamed has one of its
names after any crash, never both. What is said of a whole database is one statement, however many rows it has.

The header on disk vouches for a block's name, so a row that has turned to noise is noticed. For a block that was
renamed since it was written the header knows another name; its row holds that one, under a checksum over both.
"""

import ctypes
import os
import sqlite3
import struct
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from xxhash import xxh3_64_digest

from kvredis.storage.database import SPACES, unplaced
from kvredis.storage.memory.allocator import Extent

from .files import Files
from .segment import FORMAT_VERSION, Geometry, Name, Record, record_bytes

INDEX_NAME: Final = "index.sqlite"
INDEX_NAMES: Final = (INDEX_NAME, f"{INDEX_NAME}-wal", f"{INDEX_NAME}-shm", f"{INDEX_NAME}-journal")
_APPLICATION_ID: Final = 0x6B767264  # "kvrd": SQLite keeps it in the file's header, for file(1) and for us
EPOCH_BITS: Final = 40
"""Sequence numbers of one run of the server, as bits below the number of the run."""

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE records (
    key BLOB NOT NULL, space INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, expire_at_ms INTEGER NOT NULL, seq INTEGER NOT NULL,
    checksum BLOB NOT NULL, alias BLOB, PRIMARY KEY (space, key)) WITHOUT ROWID;
CREATE TABLE eviction (seqs BLOB NOT NULL);
CREATE TABLE quarantine (
    key BLOB NOT NULL, space INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, seq INTEGER NOT NULL, reason TEXT NOT NULL);
"""
_SEQ_BYTES: Final = 8
_SPACE_BYTES: Final = 2
_CHECK_BYTES: Final = 8

STAY: Final[tuple[int | None, ...]] = tuple(range(SPACES))
"""The step of databases in which each stays where it is."""


class Unusable(Exception):
    """Raised when the directory's index cannot be used. `ours` says whether it may be thrown away: a cache that lost
    its index, or one of an older format; not what another program, or a newer kvredis, has written."""

    def __init__(self, reason: str, *, ours: bool) -> None:
        super().__init__(reason)
        self.ours = ours


def is_damage(error: Exception) -> bool:
    """Whether it is the bytes' fault; permissions or a full disk are not, and no reason to throw anything away."""
    if not isinstance(error, sqlite3.Error):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


class Quarantined(NamedTuple):
    """A record that was not what the index says, and in what way."""

    record: Record
    reason: str


class Row(NamedTuple):
    """What the index holds of a record, beside its name."""

    extent: Extent
    length: int
    expire_at_ms: int
    seq: int
    checksum: bytes
    written_as: Name


def row_of(record: Record) -> Row:
    """The row of a record as it is now."""
    return Row(record.extent, record.length, record.expire_at_ms, record.seq, record.checksum, record.written_as)


@dataclass(slots=True)
class Batch:
    """What the index has yet to learn, all of it at once: first the steps of whole databases, then single rows.

    Rows are values, not records: those go on changing while a batch is being written.
    """

    moved: tuple[int | None, ...] = STAY
    """Where the rows of each database go; None = they are deleted."""
    changes: defaultdict[int, dict[bytes, Row | None]] = field(default_factory=lambda: defaultdict(dict))
    """For each database, the row that a key has after that; None = none."""
    quarantined: list[Quarantined] = field(default_factory=list)
    replaces: bool = False
    """A record that is confirmed loses its place to another one: what is new has to be on the device first."""

    def note(self, name: Name, row: Row | None) -> None:
        """Give a name another row, or None = none."""
        self.changes[name[1]][name[0]] = row

    def move(self, step: tuple[int | None, ...]) -> None:
        """Have databases, as they are after all that is in the batch, go where `step` says: no two to one place."""
        self.moved = tuple(None if where is None else step[where] for where in self.moved)
        changes = self.changes
        self.changes = defaultdict(dict)
        for space, rows in changes.items():
            where = step[space]
            if where is not None:
                self.changes[where] = rows

    def add(self, later: "Batch") -> None:
        """Have the batch do what `later` would do after it, too."""
        if later.moved != STAY:
            self.move(later.moved)
        for space, rows in later.changes.items():
            self.changes[space].update(rows)
        self.quarantined += later.quarantined
        self.replaces = self.replaces or later.replaces

    def __len__(self) -> int:
        return sum(map(len, list(self.changes.values()))) + len(self.quarantined) + (self.moved != STAY)


def _alias(name: Name, written_as: Name) -> bytes | None:
    """The column of that name: nothing, or a checksum, and database and key in the header."""
    if name == written_as:
        return None
    written = written_as[1].to_bytes(_SPACE_BYTES, "little") + written_as[0]
    return _check(name, written) + written


def _of_alias(name: Name, alias: bytes) -> Name:
    """The inverse of `_alias` where there is one; ValueError when either name is not what it was."""
    written = alias[_CHECK_BYTES:]
    if _check(name, written) != alias[:_CHECK_BYTES]:
        raise ValueError("a row has turned to noise")
    return written[_SPACE_BYTES:], int.from_bytes(written[:_SPACE_BYTES], "little")


def _check(name: Name, written: bytes) -> bytes:
    check: bytes = xxh3_64_digest(b"%d %d %b%b" % (name[1], len(written), written, name[0]))
    return check


def _moved(key: bytes, space: int, to: int, alias: bytes | None) -> bytes | None:
    """The SQL function that says what the column becomes when a row goes to another database."""
    try:
        return _alias((key, to), (key, space) if alias is None else _of_alias((key, space), alias))
    except (TypeError, ValueError):
        return alias  # noise stays noise, and is found at the next start


_opened: Final["weakref.WeakSet[DiskIndex]"] = weakref.WeakSet()


@cache
def _watch_forks() -> None:
    """See to it, once, that a process that is forked from this one closes no connection, even where it ends.

    WHY: one that is closed takes the log into the database and removes its file, as it has the lock to itself, or so
    its memory has it. We would go on writing to a file without a name, and a kill would lose all of it.
    """

    def keep() -> None:
        for index in _opened:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(index._connection))  # for ever: no end of it reaches SQLite

    os.register_at_fork(after_in_child=keep)


class DiskIndex:
    """The rows of one directory. Every method blocks; calls must not overlap (the tier's settling lock sees to it).

    sqlite3.Error comes out as it is; after one, what was to be applied has not been.
    """

    def __init__(self, connection: sqlite3.Connection, files: Files) -> None:
        self._connection = connection
        self._files = files
        self._do = connection.execute
        _opened.add(self)
        _watch_forks()

    @classmethod
    def open(cls, directory: Path, files: Files) -> "DiskIndex":
        """Open or make the index; Unusable when there is one that this version cannot work with."""
        connection: sqlite3.Connection | None = None
        index = None
        try:
            # Threads: each step is called under one lock. Exclusive: the directory's lock is ours anyway, and with it
            # SQLite needs no shared memory file.
            connection = sqlite3.connect(
                directory / INDEX_NAME, timeout=1, isolation_level=None, check_same_thread=False
            )
            connection.create_function("moved", 4, _moved, deterministic=True)
            opened = cls(connection, files)
            opened._check_format()
            index = opened
            return index
        except sqlite3.Error as error:
            raise Unusable(f"its index cannot be read: {error}", ours=is_damage(error)) from error
        finally:
            if index is None and connection is not None:
                connection.close()

    def _check_format(self) -> None:
        self._do("PRAGMA locking_mode=EXCLUSIVE")
        tables = self._do("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        application_id = self._do("PRAGMA application_id").fetchone()[0]
        version = self._do("PRAGMA user_version").fetchone()[0]
        if tables and application_id != _APPLICATION_ID:
            raise Unusable(f"{INDEX_NAME} is another program's database", ours=False)
        if tables and version > FORMAT_VERSION:
            raise Unusable(f"it was written in format {version}, by a newer kvredis", ours=False)
        if tables and version < FORMAT_VERSION:
            raise Unusable(f"it was written in format {version}, by an older kvredis", ours=True)
        self._do("PRAGMA journal_mode=WAL")
        self._do("PRAGMA synchronous=NORMAL")
        if not tables:
            self._files.step("index: schema")
            self._connection.executescript(
                f"BEGIN; {_SCHEMA} PRAGMA application_id={_APPLICATION_ID}; PRAGMA user_version={FORMAT_VERSION}; "
                "INSERT INTO facts VALUES ('epoch', 0), ('syncs', 0), ('segment_bytes', 0); COMMIT"
            )

    # ---- at start and at the end ---------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        """What is wrong with the database's pages, if anything: 0.1 s for 100,000 records."""
        answer = str(self._do("PRAGMA quick_check(1)").fetchone()[0])
        return None if answer == "ok" else answer

    def segment_bytes(self) -> int:
        """What the directory's segments were cut to; 0 when none was yet."""
        return int(self._do("SELECT value FROM facts WHERE name='segment_bytes'").fetchone()[0])

    def begin_epoch(self, segment_bytes: int) -> int:
        """Durably begin another run of the server; gives the first sequence number that was never used.

        Records that were in quarantine are forgotten: their extents are free from now on.
        """
        with self._transaction(durable=True):
            self._do("UPDATE facts SET value=value+1 WHERE name='epoch'")
            self._do("UPDATE facts SET value=? WHERE name='segment_bytes'", (segment_bytes,))
            self._do("DELETE FROM quarantine")
        return int(self._do("SELECT value FROM facts WHERE name='epoch'").fetchone()[0]) << EPOCH_BITS

    def rows(self, geometry: Geometry) -> list[Record]:
        """Every record, in the order in which they would leave, coldest first; ValueError for a row that cannot be."""
        records = list(self._rows(geometry))
        ranks = {seq: rank for rank, seq in enumerate(self._order())}
        records.sort(key=lambda record: ranks.get(record.seq, record.seq))  # no rank comes near a sequence number
        return records

    def _order(self) -> tuple[int, ...]:
        """The sequence numbers of the records that were there at the last clean stop, coldest first."""
        row = self._do("SELECT seqs FROM eviction").fetchone()
        seqs = row[0] if row is not None and type(row[0]) is bytes else b""
        return struct.unpack(f"<{len(seqs) // _SEQ_BYTES}Q", seqs[: len(seqs) // _SEQ_BYTES * _SEQ_BYTES])

    def _rows(self, geometry: Geometry) -> Iterator[Record]:
        stride_bytes = geometry.stride_bytes  # a hundred thousand times: no call that can be spared
        for key, space, segment, offset, length, expire_at_ms, seq, checksum, alias in self._do(
            "SELECT key, space, segment, offset, length, expire_at_ms, seq, checksum, alias FROM records"
        ):
            if not (
                type(key) is type(checksum) is bytes
                and type(space) is type(segment) is type(offset) is int
                and type(length) is type(expire_at_ms) is type(seq) is int
            ):
                raise ValueError("a row has turned to noise")
            extent = Extent(segment * stride_bytes + offset, record_bytes(length))
            record = Record(key, unplaced(space), extent, length, expire_at_ms, seq, checksum)
            if alias is not None:
                record.written_key, record.written_space = _of_alias(record.name, alias)
            yield record

    def quarantined(self) -> list[tuple[bytes, int, str]]:
        """Key, database and reason of each record that is in quarantine."""
        return self._do("SELECT key, space, reason FROM quarantine").fetchall()

    def abandon(self) -> None:
        """Close it as it is."""
        self._connection.close()

    def close(self, seqs: Sequence[int]) -> None:
        """Durably note the order in which records would leave, by their sequence numbers, coldest first, and close.

        In one piece: a column of ranks would take a second for 100,000 records. What is written later is hotter than
        all that was ordered here.
        """
        try:
            with self._transaction(durable=True):
                self._do("DELETE FROM eviction")
                self._do("INSERT INTO eviction VALUES (?)", (struct.pack(f"<{len(seqs)}Q", *seqs),))
        finally:
            self._connection.close()

    # ---- in between ----------------------------------------------------------------------------------------------

    def apply(self, batch: Batch, geometry: Geometry, *, durable: bool) -> None:
        """Do what the batch says, in one transaction; `durable`: on the device on return."""
        gone = [(space, key) for space, rows in batch.changes.items() for key, row in rows.items() if row is None]
        written = [
            (
                *(key, space, *geometry.locate(row.extent), row.length),
                *(row.expire_at_ms, row.seq, row.checksum, _alias((key, space), row.written_as)),
            )
            for space, rows in batch.changes.items()
            for key, row in rows.items()
            if row is not None
        ]
        strays = [
            (record.key, record.space, *geometry.locate(record.extent), record.length, record.seq, reason)
            for record, reason in batch.quarantined
        ]
        with self._transaction(durable=durable):
            self._move(batch.moved)
            self._connection.executemany("DELETE FROM records WHERE space=? AND key=?", gone)
            self._connection.executemany("REPLACE INTO records VALUES (?,?,?,?,?,?,?,?,?)", written)
            self._connection.executemany("INSERT INTO quarantine VALUES (?,?,?,?,?,?,?)", strays)

    def _move(self, moved: tuple[int | None, ...]) -> None:
        """Delete databases and have others change places, by way of numbers that no database has."""
        if all(where is None for where in moved):
            self._do("DELETE FROM records")  # without a WHERE SQLite looks at no row
            return
        for space, where in enumerate(moved):
            if where is None:
                self._do("DELETE FROM records WHERE space=?", (space,))
            elif where != space:
                self._do(
                    "UPDATE records SET space=-1-?, alias=moved(key, space, ?, alias) WHERE space=?",
                    (where, where, space),
                )
        if moved != STAY:
            self._do("UPDATE records SET space=-1-space WHERE space<0")

    def _transaction(self, *, durable: bool = False) -> "_Transaction":
        return _Transaction(self._connection, self._files, durable)


class _Transaction:
    """One all-or-nothing step in a with-block."""

    __slots__ = ("_connection", "_durable", "_files")

    def __init__(self, connection: sqlite3.Connection, files: Files, durable: bool) -> None:
        self._connection = connection
        self._files = files
        self._durable = durable

    def __enter__(self) -> None:
        self._files.step("index: begin")
        if self._durable:
            self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._durable:
                    # A commit without a change writes nothing, and then SQLite waits for nothing.
                    self._connection.execute("UPDATE facts SET value=value+1 WHERE name='syncs'")
                self._files.step("index: commit")
                self._connection.execute("COMMIT")
                self._files.step("index: durable" if self._durable else "index: committed")
        finally:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
            if self._durable:
                with suppress(sqlite3.Error):
                    self._connection.execute("PRAGMA synchronous=NORMAL")
