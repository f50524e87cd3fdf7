"""What lies where on disk, in a SQLite database beside the segments.

SQLite rather than a log of our own: its recovery has been proven by far more crashes than ours ever will be. WAL mode,
so that a commit is one append; synchronous=NORMAL, with which a commit waits for no device and a checkpoint alone does,
so that a loss of power costs the last commits but never the database; and FULL for the one commit that `apply` is asked
to make durable. The tier holds every row in memory as well and reads this once, at start; what changes is handed over
in batches by a thread that may block.

A batch is all or nothing, and batches take effect in their order. That is what the tier's promise rests on: the row of
a block that has left is gone before other bytes are written over its record.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from .files import Files
from .segment import FORMAT_VERSION, Geometry, Record, record_bytes

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
    checksum BLOB NOT NULL, rank INTEGER NOT NULL, PRIMARY KEY (space, key)) WITHOUT ROWID;
CREATE TABLE quarantine (
    key BLOB NOT NULL, space INTEGER NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, seq INTEGER NOT NULL, reason TEXT NOT NULL);
"""

Name = tuple[bytes, int]


class Unusable(Exception):
    """The directory's index cannot be used. `ours` says whether it may be thrown away: a cache that lost its index,
    or one of an older format; not what somebody else, or a newer kvredis, has written."""

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


class DiskIndex:
    """The rows of one directory. Every method blocks; calls must not overlap (the tier's settling lock sees to it).

    sqlite3.Error comes out as it is; after one, what was to be applied has not been.
    """

    def __init__(self, connection: sqlite3.Connection, files: Files) -> None:
        self._connection = connection
        self._files = files
        self._do = connection.execute

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
            raise Unusable(f"{INDEX_NAME} is somebody else's database", ours=False)
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
        """Durably begin another run of the server; gives the first sequence number that nobody has ever used.

        Records that were in quarantine are forgotten: their extents are free from now on.
        """
        with self._transaction(durable=True):
            self._do("UPDATE facts SET value=value+1 WHERE name='epoch'")
            self._do("UPDATE facts SET value=? WHERE name='segment_bytes'", (segment_bytes,))
            self._do("DELETE FROM quarantine")
        return int(self._do("SELECT value FROM facts WHERE name='epoch'").fetchone()[0]) << EPOCH_BITS

    def rows(self, geometry: Geometry) -> Iterator[Record]:
        """Every record, in the order in which they would leave, coldest first."""
        for key, space, segment, offset, length, expire_at_ms, seq, checksum in self._do(
            "SELECT key, space, segment, offset, length, expire_at_ms, seq, checksum FROM records ORDER BY rank, seq"
        ):
            extent = geometry.address(segment, offset, record_bytes(length))
            yield Record(key, space, extent, length, expire_at_ms, seq, checksum)

    def quarantined(self) -> list[tuple[bytes, int, str]]:
        """Key, database and reason of each record that is in quarantine."""
        return self._do("SELECT key, space, reason FROM quarantine").fetchall()

    def abandon(self) -> None:
        """Close it as it is."""
        self._connection.close()

    def close(self, order: Iterable[Name]) -> None:
        """Durably note the order in which records would leave, coldest first, and close.

        Ranks count from 0 and a record's first rank is its sequence number, which no count ever reaches: what is
        written later is hotter than all that was ordered here.
        """
        try:
            with self._transaction(durable=True):
                ranks = ((rank, space, key) for rank, (key, space) in enumerate(order))
                self._connection.executemany("UPDATE records SET rank=? WHERE space=? AND key=?", ranks)
        finally:
            self._connection.close()

    # ---- in between ----------------------------------------------------------------------------------------------

    def apply(
        self,
        changes: Mapping[Name, Record | None],
        quarantined: Iterable[Quarantined],
        geometry: Geometry,
        *,
        durable: bool,
    ) -> None:
        """Have each name's row be this record, or none, in one transaction; `durable`: on the device on return."""
        gone = [(space, key) for (key, space), record in changes.items() if record is None]
        written = [
            (
                *(record.key, record.space, *geometry.locate(record.extent), record.length),
                *(record.expire_at_ms, record.seq, record.checksum, record.seq),
            )
            for record in changes.values()
            if record is not None
        ]
        strays = [
            (record.key, record.space, *geometry.locate(record.extent), record.length, record.seq, reason)
            for record, reason in quarantined
        ]
        with self._transaction(durable=durable):
            self._connection.executemany("DELETE FROM records WHERE space=? AND key=?", gone)
            self._connection.executemany("REPLACE INTO records VALUES (?,?,?,?,?,?,?,?,?)", written)
            self._connection.executemany("INSERT INTO quarantine VALUES (?,?,?,?,?,?,?)", strays)

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
