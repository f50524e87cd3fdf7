"""The state of the disk tier, and the steps that keep it true: where each record lies, which may leave, what the index
has yet to learn. No file is touched here.

An extent always has exactly one owner: a hole of the allocator, a writer (`place`), a record that can be read, one
that has left but whose row may still be in the index, one that has left under a reader, or it is set aside because the
device or the bytes there were bad. `check_integrity` adds them up.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice

from kvredis.storage.database import SPACES, Database
from kvredis.storage.memory.allocator import Allocator, Extent

from .index import STAY, Batch, Quarantined, row_of
from .recovery import Opened, free_room
from .segment import KEY_BYTES_MAX, Name, Record, record_bytes

EVICT_PART = 32
EVICT_BLOCKS_MAX = 16
"""As many blocks leave at a time as make room for 16 of the one that needs it, but no more than a 32nd of the disk: the
index learns of all at once, which costs 0.1 ms of CPU time."""

RUN_LOOK_PART = 8
"""Among eight times as many of the coldest as shall leave together, some are looked for that lie side by side. Four
times as many were too few: a disk on which blocks had been written one by one stayed like that."""

UNTRUE_NAMES_MAX = 512
"""How many names of `untrue` are told at a time."""

LOOK_RECORDS_MAX = 512
"""How many of the coldest are looked at under the lock for some that lie side by side."""

PROBE_AFTER = 1024
"""After so many writes in a row that the device refused, and after each power of two from there, some other spot is
tried at the expense of the coldest."""

SET_ASIDE_PART = 16
"""Bad spots that are kept out of use are at most a sixteenth of the disk."""


@dataclass(slots=True)
class DiskStats:
    """Counts since the start. `recovered` and `dropped` say what recovery kept and what it found without its bytes."""

    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    evicted: int = 0
    evicted_bytes: int = 0
    quarantined: int = 0
    write_errors: int = 0
    read_errors: int = 0
    index_errors: int = 0
    sync_errors: int = 0
    no_room: int = 0
    gave_way: int = 0
    recovered: int = 0
    dropped: int = 0

    def as_dict(self) -> dict[str, int]:
        """Every counter by name."""
        return asdict(self)


@dataclass(slots=True, eq=False)
class Contents:
    """The records of one database, by key. They stay together when databases are exchanged, and when they are cleared:
    then they leave a few at a time."""

    database: Database
    records: dict[bytes, Record] = field(default_factory=dict)
    live_bytes: int = 0
    superseded: int = 0
    superseded_bytes: int = 0
    gone: set[bytes] = field(default_factory=set)
    """Keys whose records have left since databases were exchanged, of which the index has not learned."""


@dataclass(slots=True)
class Learning:
    """What the index is learning, and what it will have when it has: see `_begin_learning`."""

    batch: Batch
    seq: int
    """The sequence number that was due when it began."""
    contents: list[Contents]
    """Which database each number is."""
    indexed: list[Contents]
    gone: list[tuple[Contents, set[bytes]]] = field(default_factory=list)


class DiskState:
    """What is where on one disk. Public methods take the lock, others expect it; none blocks beyond it."""

    def __init__(self, opened: Opened) -> None:
        self.geometry = opened.geometry
        self.direct = opened.direct
        self.fallback = opened.fallback
        """Why files are read and written through the page cache; None when they are not."""
        self.stats = DiskStats(recovered=len(opened.records), dropped=opened.dropped)
        self.live_bytes = sum(record.extent.length for record in opened.records)
        """Extents of records that can be read."""
        self._segments = opened.segments
        self._allocator: Allocator = free_room(opened)
        self._databases = [Database(number) for number in range(SPACES)]
        self._contents = {database: Contents(database) for database in self._databases}
        """Those of the databases, and of some that were cleared."""
        self._spaces = [self._contents[database].records for database in self._databases]
        self._indexed = list(self._contents.values())
        """Whose rows the index on disk has under each number. It is another than the one that has the number now, from
        an exchange on until the index learns of it."""
        self._displaced = False  # whether it may be, or may have been since the index has learned of anything
        self._learned_seq = opened.first_seq  # the number that was due when the index has begun to learn of the last
        self._cleared: list[Contents] = []
        self._undecided = False  # there may be names that belong to `untrue` and are not yet there: see `decide`
        self.decide: Callable[[], None] = lambda: None
        """Called before the index learns of anything, by a thread that may block: has `wait_for` told of all names for
        which it has to wait, and then `decided`."""
        for record in opened.records:
            contents = self._contents[self._databases[record.space]]
            contents.records[record.key] = record
            contents.live_bytes += record.extent.length
            record.database = contents.database
        self._order = OrderedDict.fromkeys(opened.records)  # coldest first; a rename changes nothing here
        self._records_max = opened.records_max
        self._seq = opened.first_seq
        self._lock = threading.Lock()  # what is where; never held across I/O, nor for longer than a millisecond or so
        self._settling = threading.Lock()  # the index and the list of segments; held across I/O; taken first
        self._reserved: set[Extent] = set()
        self._coming = 0  # records that are to lie there: several in one extent until they are written together
        self._pending = Batch()  # what the index has yet to learn
        # Why the index shall not learn of it yet: see `swap` and `wait_for`, which has nothing to give up.
        self._untrue: dict[Database, dict[bytes, Sequence[Record] | None]] = {}
        self._generation = 1  # of the records that the pending batch brings
        self._confirmed = 0  # the last generation that survives a loss of power
        self._superseded: dict[Record, None] = {}  # the longest superseded first
        self.superseded_bytes = 0
        """Extents of records that stay only until their keys' newer values are on disk."""
        self._retiring: list[Record] = []  # their rows may still be in the index on disk
        self._freeing: list[Record] = []  # the thread that is settling takes care of these
        self._lingering: set[Record] = set()  # their rows are gone, a reader is not
        self._suspects: list[Extent] = []  # could not be written, and nothing could since
        self._refused_in_a_row = 0
        self._set_aside: list[Extent] = []  # not used again before the next start

    # ---- deciding: short, suits the event loop -------------------------------------------------------------------

    def storable(self, key: bytes, length: int) -> bool:
        """Whether such a block can ever be put on this disk."""
        return len(key) <= KEY_BYTES_MAX and record_bytes(length) <= self.geometry.segment_bytes

    def abandon(self, extent: Extent) -> None:
        """Give back an extent that was reserved, or written and shall not be published."""
        with self._lock:
            self._reserved.remove(extent)
            self._coming -= 1
            self._allocator.free(extent)

    def publish(self, record: Record, instead: Iterable[Record] = ()) -> bool:
        """Make a written record the one of its key, and the hottest. False: a newer one is there, this one is gone.

        Newer is what was written later, or came by the name later, unless it is superseded. A block that was renamed
        while it was being written is given its new name (`Record.rename`) before this. `instead` are superseded
        records, under whatever names, that leave with the same step.
        """
        with self._lock:
            self._reserved.remove(record.extent)
            self._coming -= 1
            old = self._spaces[record.space].get(record.key)
            if old is not None and not old.superseded and max(old.seq, old.named_seq) > record.seq:
                self._allocator.free(record.extent)
                return False
            self._replace(old, *instead)
            record.rename(record.key, self._databases[record.space])
            self._wait_no_longer(record.key, record.database)
            self._enter(record)
            self._order[record] = None
            record.generation = self._generation
            self._pending.note(record.name, row_of(record))
            self.live_bytes += record.extent.length
            return True

    def get(self, key: bytes, space: int) -> Record | None:
        """The record of a key. It may be gone by the time that it is read: then `read` says so."""
        return self._spaces[space].get(key)

    def touch(self, record: Record) -> None:
        """Note that a record was used: it leaves last. One that has left meanwhile is nothing."""
        with self._lock:
            if record in self._order:
                self._order.move_to_end(record)

    def forget(self, key: bytes, space: int) -> bool:
        """Drop a key's record; False when there is none. Until `sync` a crash may bring it back."""
        with self._lock:
            self._wait_no_longer(key, self._databases[space])
            record = self._spaces[space].get(key)
            if record is None:
                return False
            self._retire(record)
            return True

    def supersede(self, record: Record) -> None:
        """Keep a record, which no reader is to find any more, until `publish`, `rename` or `drop` is told to let it go:
        a crash brings it back. No other block makes it leave, unless nothing else would make room."""
        with self._lock:
            if record in self._order and not record.superseded:
                record.superseded = True
                self._order.move_to_end(record)  # out of the way of a search for the coldest
                self._superseded[record] = None
                self.superseded_bytes += record.extent.length
                contents = self._contents[record.database]
                contents.superseded += 1
                contents.superseded_bytes += record.extent.length

    def drop(self, records: Iterable[Record]) -> None:
        """Let records go that are there still. Until `sync` a crash may bring them back."""
        with self._lock:
            for record in records:
                if record in self._order:
                    self._retire(record)

    @property
    def waits(self) -> bool:
        """Whether there is any name in `untrue`, or there may be."""
        return bool(self._untrue) or self._undecided

    @property
    def undecided(self) -> bool:
        """Whether there may be such names that `wait_for` was not told of: see `decide`."""
        return self._undecided

    @property
    def untrue(self) -> list[Name]:
        """The first few hundred of the names whose values have to be published, or forgotten, before the index learns
        of anything: `settle` and `sync` are False until then."""
        with self._lock:
            names = ((key, database.number) for database, keys in self._untrue.items() for key in keys)
            return list(islice(names, UNTRUE_NAMES_MAX))

    def _wait_no_longer(self, key: bytes, database: Database) -> tuple[bool, Sequence[Record] | None]:
        """Take a name out of `untrue`: whether it was there, and what was given for it."""
        keys = self._untrue.get(database)
        if keys is None or key not in keys:
            return False, None
        given = keys.pop(key)
        if not keys:
            del self._untrue[database]
        return True, given

    def rename_untrue(self, old: Name, new: Name) -> None:
        """A value that is waited for, and that memory alone has, has another name."""
        with self._lock:
            waiting = [self._wait_no_longer(key, self._databases[space]) for key, space in (old, new)]
            if any(was_waited_for for was_waited_for, _ in waiting):
                given = [records for _, records in waiting if records is not None]
                self._untrue.setdefault(self._databases[new[1]], {})[new[0]] = list(chain(*given)) if given else None

    def wait_for(self, name: Name, records: Sequence[Record] | None = None) -> None:
        """Have the index learn of nothing until the value of a name, which memory alone has, is published, or
        forgotten: what it supersedes under another name is about to go. With `records`: an exchange of databases has
        put the name over a record that is not its own, and these superseded records of the value under names that are
        not theirs."""
        with self._lock:
            keys = self._untrue.setdefault(self._databases[name[1]], {})
            before = keys.get(name[0])
            keys[name[0]] = before if records is None else list(dict.fromkeys((*(before or ()), *records)))

    def decided(self) -> None:
        """All names that `wait_for` has to be told of are known."""
        with self._lock:
            self._undecided = False

    def displaced(self, space: int, keys: Iterable[bytes]) -> list[bytes]:
        """Which of `keys` the index has rows of under this number that are another database's by now, or that have left
        since databases were exchanged: perhaps while this one had another number."""
        with self._lock:
            before = self._indexed[space]
            records = {} if before.database is self._databases[space] else before.records
            return [key for key in keys if key in records or key in before.gone] if records or before.gone else []

    def has_moved(self, record: Record) -> bool:
        """Whether the database of a record was exchanged since the index has last learned of anything. It may have the
        number again that it had, and the record have come, or changed, while it had another."""
        with self._lock:
            return not record.database.flushed and record.database.swapped >= self._learned_seq

    def give_up(self, name: Name | None = None) -> bool:
        """Wait no longer for the value of a name in `untrue`, or None = of all: what a crash would find there instead
        leaves. False when it was not waited for."""
        with self._lock:
            if name is None:
                names = [(key, database) for database, keys in self._untrue.items() for key in keys]
            else:
                names = [(name[0], self._databases[name[1]])]
            found = False
            for key, database in names:
                was_waited_for, given = self._wait_no_longer(key, database)
                found = found or was_waited_for
                if given is None:
                    continue
                for leaving in (self._contents[database].records.get(key), *given):
                    if leaving is not None and leaving.superseded and leaving in self._order:
                        self._retire(leaving)
                        self.stats.gave_way += 1
            return found

    def rename(self, old: Name, new: Name, instead: Iterable[Record] = ()) -> bool:
        """Have the record of one name be that of another, in place of the one that is there; False when there is none.

        It stays the same object, and as hot as it was. After a crash it has one of the two names. `instead` is as in
        `publish`.
        """
        with self._lock:
            record = self._spaces[old[1]].get(old[0])
            if record is None or old == new:
                return record is not None
            self._replace(self._spaces[new[1]].get(new[0]), *instead)
            self._wait_no_longer(new[0], self._databases[new[1]])
            self._take_out(record)
            record.rename(new[0], self._databases[new[1]])
            self._enter(record)
            record.renamed_seq = self._next_seq()
            self._pending.note(old, None)
            self._pending.note(new, row_of(record))
            return True

    def swap(self, first: int, second: int, *, undecided: bool = False) -> bool:
        """Exchange two databases; False when the index need not learn of it. Costs no step a record, and none of I/O.

        With `undecided` there may be values in them that memory alone has, so that there is nothing true that could be
        found of their names after a crash, nor of what they supersede. Then the index learns of nothing before `decide`
        has said which, and those are published.
        """
        with self._lock:
            spaces, databases = self._spaces, self._databases
            if first == second:
                return False
            as_indexed = [each for each in (first, second) if self._indexed[each].database is databases[each]]
            Database.exchange(databases, first, second, self._next_seq())
            spaces[first], spaces[second] = spaces[second], spaces[first]
            if not (spaces[first] or spaces[second] or self._displaced):
                for each in as_indexed:  # of these the index has no row, or will have none
                    self._indexed[each] = self._contents[databases[each]]
                return False
            step = list(STAY)
            step[first], step[second] = second, first
            self._pending.move(tuple(step))
            self._pending.replaces = self._displaced = True
            self._undecided = self._undecided or undecided
            return True

    def clear(self, space: int | None = None, *, undecided: bool = False) -> int:
        """Drop every record, or those of one database; gives how many. Until `sync` a crash may bring them back.

        The room comes back as with `forget`. Costs no step a record: they leave a few at a time, when the index learns
        of it. With `undecided` values may be gone, or wait to be written, that supersede records; see `swap`.
        """
        with self._lock:
            self._undecided = self._undecided or undecided
            leaving = range(SPACES) if space is None else (space,)
            count = 0
            for each in leaving:
                contents = self._contents[self._databases[each]]
                self._untrue.pop(contents.database, None)
                if contents.records:
                    count += len(contents.records)
                    self._clear(contents)
            if count:  # else the index will have no such row either, once it knows what is pending
                self._pending.move(tuple(None if each in leaving else each for each in STAY))
            return count

    def set_expiry(self, key: bytes, space: int, expire_at_ms: int) -> bool:
        """Note when a block shall be gone (0 = never); False when it is not on disk."""
        with self._lock:
            record = self._spaces[space].get(key)
            if record is None:
                return False
            record.expire_at_ms = expire_at_ms
            self._pending.note(record.name, row_of(record))
            return True

    def superseded(self) -> list[Record]:
        """The superseded records, as of now."""
        with self._lock:
            return list(self._superseded)

    def records(self) -> Iterator[Record]:
        """Every record, superseded ones included, coldest first, as of now."""
        with self._lock:
            return iter([record for record in self._order if not record.database.flushed])

    def __len__(self) -> int:
        contents = [self._contents[database] for database in list(self._databases)]
        return sum(len(each.records) - each.superseded for each in contents)

    @property
    def limit_bytes(self) -> int:
        """What the segments may come to."""
        return self.geometry.count * self.geometry.segment_bytes

    @property
    def file_bytes(self) -> int:
        """What the segments come to now, free room in them included."""
        return len(self._segments) * self.geometry.segment_bytes

    @property
    def free_bytes(self) -> int:
        """Room for records that no other has to leave for: free in the segments, and what these may still grow by."""
        return self._allocator.free_bytes + self.limit_bytes - self.file_bytes

    @property
    def unsettled(self) -> bool:
        """Whether `settle` has anything to do."""
        return bool(self._pending or self._retiring or self._cleared or self._undecided)

    @property
    def replaces(self) -> bool:
        """Whether `settle` would have to wait for the device: a confirmed record has been replaced."""
        return self._pending.replaces

    def figures(self) -> dict[str, int | str]:
        """What an operator wants to know, cheaply; sizes in bytes."""
        return {
            "capacity": self.limit_bytes,
            "used": self.live_bytes,
            "superseded": self.superseded_bytes,
            "files": self.file_bytes,
            "free": self.free_bytes,
            "entries": len(self),
            "entries_max": self._records_max,
            "segments": len(self._segments),
            "segment_size": self.geometry.segment_bytes,
            "direct": "yes" if self.fallback is None else self.fallback,
            **self.stats.as_dict(),
        }

    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte of every segment is accounted for, once. Waits for the thread that is
        settling."""
        with self._settling, self._lock:
            self._allocator.check_integrity()
            assert not self._freeing
            live = [record.extent for record in self._order]
            self._check_contents()
            retired = [record.extent for record in (*self._retiring, *self._lingering)]
            taken = sorted(
                [*live, *retired, *self._reserved, *self._suspects, *self._set_aside, *self._allocator.holes()]
            )
            stride = self.geometry.stride_bytes
            for number in range(self.geometry.count):
                pieces = [extent for extent in taken if extent.offset // stride == number]
                at = number * stride
                for extent in pieces:
                    assert extent.offset == at, f"{at} is lost or has two owners"
                    at += extent.length
                expected = self.geometry.segment_bytes if number in self._segments else 0
                assert at - number * stride == expected, "a segment is not fully accounted for"
            named = {(key, space): each for space, keys in enumerate(self._spaces) for key, each in keys.items()}
            assert all(record.name == name and record in self._order for name, record in named.items())
            changes = [
                ((key, space), row) for space, rows in self._pending.changes.items() for key, row in rows.items()
            ]
            for name, row in changes:
                assert row == (row_of(named[name]) if name in named else None), f"the index will not learn of {name}"
            assert len(self._reserved) <= self._coming
            assert len(self._order) + self._coming <= self._records_max
            assert self.file_bytes <= self.limit_bytes

    def _check_contents(self) -> None:
        assert self._superseded.keys() == {record for record in self._order if record.superseded}
        assert [self._contents[database].records for database in self._databases] == self._spaces
        assert self._contents.keys() == {*self._databases, *(each.database for each in self._cleared)}
        held = [record for each in self._contents.values() for record in each.records.values()]
        assert len(held) == len(self._order)
        assert all(record in self._order for record in held)
        live = [self._contents[database] for database in self._databases]
        assert self.live_bytes == sum(each.live_bytes for each in live)
        assert self.superseded_bytes == sum(each.superseded_bytes for each in live)
        for contents in live:
            superseded = [record for record in contents.records.values() if record.superseded]
            assert all(record.database is contents.database for record in contents.records.values())
            assert contents.live_bytes == sum(record.extent.length for record in contents.records.values())
            assert contents.superseded == len(superseded)
            assert contents.superseded_bytes == sum(record.extent.length for record in superseded)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _enter(self, record: Record) -> None:
        contents = self._contents[record.database]
        contents.records[record.key] = record
        contents.live_bytes += record.extent.length

    def _take_out(self, record: Record) -> Contents:
        contents = self._contents[record.database]
        del contents.records[record.key]
        if self._displaced:
            contents.gone.add(record.key)
        contents.live_bytes -= record.extent.length
        return contents

    def _clear(self, contents: Contents) -> None:
        """Have a database begin anew; its records are given back by and by (`_retire_cleared`)."""
        number = contents.database.number
        contents.database.flushed = True
        self._cleared.append(contents)
        self._databases[number] = Database(number)
        new = self._contents[self._databases[number]] = Contents(self._databases[number])
        self._spaces[number] = new.records
        self._indexed[number] = new  # each of its keys was absent, so that this is true of it from now on
        self.live_bytes -= contents.live_bytes
        self.superseded_bytes -= contents.superseded_bytes

    def _retire_cleared(self, records_max: int) -> bool:
        """Let go of some records of databases that were cleared; False when there are none left, but for those that
        say what the index has (`displaced`)."""
        contents = next((each for each in self._cleared if each not in self._indexed), None)
        if contents is None:
            return False
        for record in list(islice(contents.records.values(), records_max)):
            self._retire(record)
        if not contents.records:
            self._cleared.remove(contents)
            del self._contents[contents.database]
        return True

    def _begin_learning(self) -> "Learning":
        """What the index is about to learn, which is not pending any more."""
        present = [self._contents[each] for each in self._databases]
        begun = Learning(self._pending, self._seq, present, list(self._indexed))
        self._pending = Batch()
        for contents in self._contents.values():
            if contents.gone:
                begun.gone.append((contents, contents.gone))
                contents.gone = set()
        return begun

    def _end_learning(self, begun: "Learning", *, learned: bool) -> None:
        """Note that the index has learned of it; or that it has not, and it is pending again, before what has come
        meanwhile."""
        if not learned:
            begun.batch.add(self._pending)
            self._pending = begun.batch
            for contents, gone in begun.gone:
                contents.gone |= gone
            return
        for space, (contents, before) in enumerate(zip(begun.contents, begun.indexed, strict=True)):
            if self._indexed[space] is before:  # else it was cleared meanwhile
                self._indexed[space] = contents
        self._learned_seq = begun.seq
        self._displaced = any(database.swapped >= begun.seq for database in self._databases)

    def _next_seq(self) -> int:
        seq = self._seq
        self._seq += 1
        return seq

    def _excess(self, count: int) -> int:
        """How many more records than there may be there would be with `count` more."""
        return len(self._order) + self._coming + count - self._records_max

    def _take(self, nbytes: int, count: int = 1) -> Extent | None:
        extent = None if self._excess(count) > 0 else self._allocator.allocate(nbytes)
        if extent is not None:
            self._reserved.add(extent)
            self._coming += count
        return extent

    def _leave(self, record: Record) -> None:
        """Let a record go from memory, and soon from the index."""
        del self._order[record]
        contents = self._take_out(record)
        if record.superseded:
            del self._superseded[record]
            contents.superseded -= 1
            contents.superseded_bytes -= record.extent.length
        if record.database.flushed:  # then neither the sums nor the index know of it
            return
        self.live_bytes -= record.extent.length
        if record.superseded:
            self.superseded_bytes -= record.extent.length
        self._pending.note(record.name, None)

    def _retire(self, record: Record) -> None:
        """Let a record go; its extent is free once the index knows and no reader has it."""
        self._leave(record)
        self._retiring.append(record)

    def _replace(self, *records: Record | None) -> None:
        """Let records go, as far as they are there, for what comes in their place with the same batch."""
        for record in records:
            if record is not None and record in self._order:
                self._pending.replaces = self._pending.replaces or record.generation <= self._confirmed
                self._retire(record)

    def _put_in_quarantine(self, record: Record, reason: str) -> None:
        record.damaged = True
        self._leave(record)
        self._pending.quarantined.append(Quarantined(record, reason))
        if not self._shuns(record.extent):
            self._retiring.append(record)
        self.stats.quarantined += 1

    def _shuns(self, extent: Extent) -> bool:
        """Keep a bad spot of the device out of use until the next start, or best fit would go for it again and again.
        False, and it is still the caller's, when there is too much of that already: a device that refuses everything
        for a while must not be left without room."""
        aside_bytes = sum(each.length for each in self._set_aside)
        if self._set_aside and (aside_bytes + extent.length) * SET_ASIDE_PART > self.limit_bytes:
            return False
        self._set_aside.append(extent)
        return True

    def _suspect(self, extent: Extent, *, refused: bool) -> None:
        """A write came to nothing: it is the spot, or all of the device. Until a write elsewhere succeeds that is open,
        and no record that can be read shall leave to find out: other holes are tried, and then the same again."""
        self._refused_in_a_row += refused
        if refused:
            self._suspects.append(extent)
        else:
            self._allocator.free(extent)

    def _acquit(self) -> bool:
        """No other hole is left: take suspected spots into use again. False when there is none."""
        for extent in self._suspects:
            self._allocator.free(extent)
        acquitted, self._suspects = bool(self._suspects), []
        return acquitted

    def _spares(self) -> bool:
        """Whether no record shall leave for a write that will most likely be refused like the last; now and then one
        does, so that a full disk whose one hole is bad is not stuck with it."""
        in_a_row = self._refused_in_a_row
        if in_a_row >= PROBE_AFTER and in_a_row & (in_a_row - 1) == 0:
            self._refused_in_a_row += 1  # one such try is enough
            return False
        return in_a_row > 0

    def _convict(self) -> None:
        """Leave the suspected spots unused, as the device's fault, since a write elsewhere has succeeded."""
        if self._refused_in_a_row:
            self._refused_in_a_row = 0
            for extent in self._suspects:
                if not self._shuns(extent):
                    self._allocator.free(extent)
            self._suspects.clear()

    def _evicted_at_once(self, nbytes: int, count: int = 1) -> int:
        """For how many blocks of `nbytes`, or runs of `count` of them, others leave at a time, since the index learns
        of it in one step."""
        return max(1, min(EVICT_BLOCKS_MAX // count, self.limit_bytes // EVICT_PART // nbytes))

    def _evict_some(self, nbytes: int, count: int) -> list[Record] | None:
        """Evict for a few blocks of `nbytes`; None when not even one would find room among the coldest."""
        left = self._evict(nbytes, count)
        for _ in range(self._evicted_at_once(nbytes) - 1):
            if left is not None:
                left += self._evict(nbytes, count) or []
        return left

    def _evict_runs(self, nbytes: int, count: int) -> list[Record] | None:
        """Evict for a few runs of `count` blocks, `nbytes` in all; None when the coldest do not lie side by side, or
        there are too many records."""
        if self._excess(count) > 0:
            return None
        left: list[Record] = []
        for _ in range(self._evicted_at_once(nbytes, count)):
            coldest = islice(filter(self._may_leave, self._order), RUN_LOOK_PART * count)
            found = self._allocator.window(nbytes, coldest)
            if found is None:
                break
            self._let_leave(found[1])
            left += found[1]
        return left or None

    def _evict(self, nbytes: int, count: int) -> list[Record] | None:
        """Let the coldest records go between which `nbytes` will be free, or as many of them as `count` more would be
        too many; None when those that are looked at would not do."""
        idle = filter(self._may_leave, self._order)
        excess = self._excess(count)
        if excess > 0:
            leaving = list(islice(idle, excess))
            leaving = leaving if len(leaving) == excess else []
        else:
            found = self._allocator.window(nbytes, islice(idle, LOOK_RECORDS_MAX))
            leaving = [] if found is None else found[1]
        self._let_leave(leaving)
        return leaving or None

    @staticmethod
    def _may_leave(record: Record) -> bool:
        return not (record.readers or record.superseded)

    def _give_way(self, nbytes: int, count: int, instead: Iterable[Record], *, evict: bool) -> list[Record] | None:
        """Let superseded records go since nothing else makes room: those of the very values that are to be written, and
        with `evict` the longest superseded and some of the coldest between them. None when not even that would do."""
        candidates: Iterable[Record] = [each for each in instead if each in self._order]
        if evict:
            coldest = islice(filter(self._may_leave, self._order), LOOK_RECORDS_MAX)
            candidates = dict.fromkeys(chain(candidates, islice(self._superseded, LOOK_RECORDS_MAX), coldest))
        idle = (each for each in candidates if not each.readers)
        excess = self._excess(count)
        if excess > 0:
            leaving = list(islice(idle, excess))
            leaving = leaving if len(leaving) == excess else []
        else:
            found = self._allocator.window(nbytes, idle)
            leaving = [] if found is None else found[1]
        superseded = [each for each in leaving if each.superseded]
        self.stats.gave_way += len(superseded)
        for record in superseded:
            self._retire(record)
        self._let_leave([each for each in leaving if not each.superseded])
        return leaving or None

    def _let_leave(self, leaving: list[Record]) -> None:
        """Records leave to make room."""
        for record in leaving:
            self._retire(record)
            if not record.database.flushed:
                self.stats.evicted += 1
                self.stats.evicted_bytes += record.extent.length
