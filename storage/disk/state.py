"""The state of the disk tier, and the steps that keep it true: who lies where, who may leave, what the index
has yet to learn. No file is touched here.

An extent always has exactly one owner: a hole of the allocator, a writer (`place`), a record that can be read, one
that has left but whose row may still be in the index, one that has left under a reader, or it is set aside because the
device or the bytes there were bad. `check_integrity` adds them up.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from types import MappingProxyType

from kvredis.storage.database import SPACES, Database
from kvredis.storage.memory.allocator import Allocator, Extent

from .index import STAY, Batch, Quarantined, row_of
from .recovery import Opened, free_room
from .segment import KEY_BYTES_MAX, Name, Record, record_bytes

EVICT_PART = 64
EVICT_BLOCKS_MAX = 16
"""As many blocks leave at a time as make room for 16 of the one that needs it, but no more than a 64th of the disk."""

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
        self._spaces: list[dict[bytes, Record]] = [{} for _ in range(SPACES)]
        self._databases = [Database(number) for number in range(SPACES)]
        for record in opened.records:
            self._spaces[record.space][record.key] = record
            record.database = self._databases[record.space]
        self._order = OrderedDict.fromkeys(opened.records)  # coldest first; a rename changes nothing here
        self._records_max = opened.records_max
        self._seq = opened.first_seq
        self._lock = threading.Lock()  # what is where; never held across I/O, nor for longer than a millisecond or so
        self._settling = threading.Lock()  # the index and the list of segments; held across I/O; taken first
        self._reserved: set[Extent] = set()
        self._coming = 0  # records that are to lie there: several in one extent until they are written together
        self._pending = Batch()  # what the index has yet to learn
        # Why the index shall not learn of it yet: see `swap` and `wait_for`, which has nothing to give up.
        self._untrue: dict[tuple[bytes, Database], Sequence[Record] | None] = {}
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
            self._untrue.pop((record.key, record.database), None)
            self._spaces[record.space][record.key] = record
            self._order[record] = None
            record.generation = self._generation
            self._pending.note(record.name, row_of(record))
            self.live_bytes += record.extent.length
            return True

    def get(self, key: bytes, space: int) -> Record | None:
        """The record of a key. It may be gone by the time that it is read: then `read` says so."""
        return self._spaces[space].get(key)

    def keys(self, space: int) -> KeysView[bytes]:
        """The keys of a database."""
        return self._spaces[space].keys()

    def touch(self, record: Record) -> None:
        """Note that a record was used: it leaves last. One that has left meanwhile is nothing."""
        with self._lock:
            if record in self._order:
                self._order.move_to_end(record)

    def forget(self, key: bytes, space: int) -> bool:
        """Drop a key's record; False when there is none. Until `sync` a crash may bring it back."""
        with self._lock:
            self._untrue.pop((key, self._databases[space]), None)
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
                self._order.move_to_end(record)  # out of the way of who looks for the coldest
                self._superseded[record] = None
                self.superseded_bytes += record.extent.length

    def drop(self, records: Iterable[Record]) -> None:
        """Let records go that are there still. Until `sync` a crash may bring them back."""
        with self._lock:
            for record in records:
                if record in self._order:
                    self._retire(record)

    @property
    def waits(self) -> bool:
        """Whether there is any name in `untrue`."""
        return bool(self._untrue)

    @property
    def untrue(self) -> list[Name]:
        """The names whose values have to be published, or forgotten, before the index learns of anything: `settle` and
        `sync` are False until then."""
        with self._lock:
            return [(key, database.number) for key, database in self._untrue]

    def rename_untrue(self, old: Name, new: Name) -> None:
        """A value that is waited for, and that memory alone has, has another name."""
        with self._lock:
            names = [(key, self._databases[space]) for key, space in (old, new)]
            waiting = [self._untrue.pop(name) for name in names if name in self._untrue]
            if waiting:
                given = [records for records in waiting if records is not None]
                self._untrue[names[1]] = [record for records in given for record in records] if given else None

    def wait_for(self, name: Name) -> None:
        """Have the index learn of nothing until the value of a name is published, or forgotten: what it supersedes
        under another name is about to go."""
        with self._lock:
            self._untrue.setdefault((name[0], self._databases[name[1]]), None)

    def give_up(self, name: Name | None = None) -> bool:
        """Wait no longer for the value of a name in `untrue`, or None = of all: what a crash would find there instead
        leaves. False when it was not waited for."""
        with self._lock:
            wanted = None if name is None else (name[0], self._databases[name[1]])
            names = list(self._untrue) if wanted is None else [wanted] if wanted in self._untrue else []
            for each in names:
                given = self._untrue.pop(each)
                if given is None:
                    continue
                for leaving in (self._spaces[each[1].number].get(each[0]), *given):
                    if leaving is not None and leaving.superseded and leaving in self._order:
                        self._retire(leaving)
                        self.stats.gave_way += 1
            return bool(names)

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
            self._untrue.pop((new[0], self._databases[new[1]]), None)
            del self._spaces[old[1]][old[0]]
            self._spaces[new[1]][new[0]] = record
            record.rename(new[0], self._databases[new[1]])
            record.renamed_seq = self._next_seq()
            self._pending.note(old, None)
            self._pending.note(new, row_of(record))
            return True

    def swap(self, first: int, second: int, untrue: Mapping[Name, Sequence[Record]] = MappingProxyType({})) -> None:
        """Exchange two databases. Costs no step a record, and none of I/O.

        `untrue` are names, as they are afterwards, whose values memory alone has: until those are published nothing is
        true that could be found of these names after a crash, nor of the superseded records that are given for each, so
        the index learns of nothing.
        """
        with self._lock:
            spaces = self._spaces
            if first == second:
                return
            Database.exchange(self._databases, first, second, self._next_seq())
            for (key, space), records in untrue.items():
                self._untrue[key, self._databases[space]] = records
            if not (spaces[first] or spaces[second]):
                return
            spaces[first], spaces[second] = spaces[second], spaces[first]
            step = list(STAY)
            step[first], step[second] = second, first
            self._pending.move(tuple(step))
            self._pending.replaces = True

    def clear(self, space: int | None = None) -> int:
        """Drop every record, or those of one database; gives how many. Until `sync` a crash may bring them back.

        The room comes back as with `forget`. Takes milliseconds for a hundred thousand records.
        """
        with self._lock:
            leaving = range(SPACES) if space is None else (space,)
            self._untrue = {name: old for name, old in self._untrue.items() if name[1].number not in leaving}
            count = sum(len(self._spaces[each]) for each in leaving)
            if not count:  # then the index will have no such row either, once it knows what is pending
                return 0
            if count == len(self._order):
                self._retiring += self._order
                self._order = OrderedDict()
                self.live_bytes = self.superseded_bytes = 0
                self._superseded = {}
            else:
                order, records = self._order, list(self._spaces[leaving[0]].values())
                for record in records:
                    del order[record]
                    if record.superseded:
                        self._forget_superseded(record)
                self.live_bytes -= sum([record.extent.length for record in records])
                self._retiring += records
            for each in leaving:
                self._spaces[each] = {}
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
            return iter(list(self._order))

    def __len__(self) -> int:
        return len(self._order) - len(self._superseded)

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
        return bool(self._pending or self._retiring)

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
        """Raise AssertionError unless every byte of every segment is accounted for, once. Waits for who is settling."""
        with self._settling, self._lock:
            self._allocator.check_integrity()
            assert not self._freeing
            live = [record.extent for record in self._order]
            assert sum(extent.length for extent in live) == self.live_bytes
            assert self._superseded.keys() == {record for record in self._order if record.superseded}
            assert sum(record.extent.length for record in self._superseded) == self.superseded_bytes
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
            assert len(named) == len(self._order)
            assert all(record.name == name and record in self._order for name, record in named.items())
            changes = [
                ((key, space), row) for space, rows in self._pending.changes.items() for key, row in rows.items()
            ]
            for name, row in changes:
                assert row == (row_of(named[name]) if name in named else None), f"the index will not learn of {name}"
            assert len(self._reserved) <= self._coming
            assert len(self._order) + self._coming <= self._records_max
            assert self.file_bytes <= self.limit_bytes

    # ---- steps -------------------------------------------------------------------------------------------------------

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
        del self._spaces[record.space][record.key]
        self.live_bytes -= record.extent.length
        if record.superseded:
            self._forget_superseded(record)
        self._pending.note(record.name, None)

    def _forget_superseded(self, record: Record) -> None:
        del self._superseded[record]
        self.superseded_bytes -= record.extent.length

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
        """A write has succeeded, so it was those spots."""
        if self._refused_in_a_row:
            self._refused_in_a_row = 0
            for extent in self._suspects:
                if not self._shuns(extent):
                    self._allocator.free(extent)
            self._suspects.clear()

    def _evicted_at_once(self, nbytes: int) -> int:
        """For how many blocks of `nbytes` others leave at a time, since the index learns of it in one step."""
        return max(1, min(EVICT_BLOCKS_MAX, self.limit_bytes // EVICT_PART // nbytes))

    def _evict_some(self, nbytes: int, count: int) -> list[Record] | None:
        """Evict for a few blocks of `nbytes`; None when not even one would find room among the coldest."""
        left = self._evict(nbytes, count)
        for _ in range(self._evicted_at_once(nbytes) - 1):
            if left is not None:
                left += self._evict(nbytes, count) or []
        return left

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
            self.stats.evicted += 1
            self.stats.evicted_bytes += record.extent.length
