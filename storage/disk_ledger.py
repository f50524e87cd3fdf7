"""The state behind the disk tier's door, and the steps that keep it true: who lies where, who may leave, what the index
has yet to learn. No file is touched here.

An extent always has exactly one owner: a hole of the allocator, a writer (`reserve`), a record that can be read, one
that has left but whose row may still be in the index, one that has left under a reader, or it is set aside because the
device or the bytes there were bad. `check_integrity` adds them up.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from .allocator import Allocator, Extent
from .disk_index import Name, Quarantined
from .disk_recovery import Opened, free_room
from .segment import KEY_BYTES_MAX, Record, record_bytes


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
    recovered: int = 0
    dropped: int = 0


class DiskLedger:
    """What is where on one disk. Public methods take the lock, others expect it; none blocks beyond it."""

    def __init__(self, opened: Opened) -> None:
        self.geometry = opened.geometry
        self.stats = DiskStats(recovered=len(opened.records), dropped=opened.dropped)
        self.live_bytes = sum(record.extent.length for record in opened.records)
        """Extents of records that can be read."""
        self._segments = opened.segments
        self._allocator: Allocator = free_room(opened)
        self._order: OrderedDict[Name, Record] = OrderedDict((each.name, each) for each in opened.records)
        self._lock = threading.Lock()  # what is where; never held across I/O
        self._settling = threading.Lock()  # the index and the list of segments; held across I/O; taken first
        self._reserved: set[Extent] = set()
        self._changes: dict[Name, Record | None] = {}
        self._retiring: list[Record] = []  # their rows may still be in the index on disk
        self._lingering: set[Record] = set()  # their rows are gone, a reader is not
        self._quarantine: list[Quarantined] = []  # not yet in the index
        self._set_aside: list[Extent] = []  # not used again before the next start

    # ---- deciding: short, suits the event loop -------------------------------------------------------------------

    def storable(self, key: bytes, length: int) -> bool:
        """Whether such a block can ever be put on this disk."""
        return len(key) <= KEY_BYTES_MAX and record_bytes(length) <= self.geometry.segment_bytes

    def reserve(self, length: int) -> Extent | None:
        """Room for the record of a payload of `length` bytes, out of what is free now; None when nothing is.

        It ends in `write`, or in `abandon`.
        """
        with self._lock:
            return self._take(record_bytes(length))

    def abandon(self, extent: Extent) -> None:
        """Give back an extent that was reserved, or written and shall not be published."""
        with self._lock:
            self._reserved.remove(extent)
            self._allocator.free(extent)

    def publish(self, record: Record) -> bool:
        """Make a written record the one of its key, and the hottest. False: a newer one is there, this one is gone."""
        with self._lock:
            self._reserved.remove(record.extent)
            old = self._order.get(record.name)
            if old is not None and old.seq > record.seq:
                self._allocator.free(record.extent)
                return False
            if old is not None:
                self._retire(old)
            self._order[record.name] = record
            self._changes[record.name] = record
            self.live_bytes += record.extent.length
            return True

    def get(self, key: bytes, space: int) -> Record | None:
        """The record of a key. It may be gone by the time that it is read: then `read` says so."""
        return self._order.get((key, space))

    def touch(self, record: Record) -> None:
        """Note that a record was used: it leaves last. One that has left meanwhile is nothing."""
        with self._lock:
            if self._order.get(record.name) is record:
                self._order.move_to_end(record.name)

    def forget(self, key: bytes, space: int) -> bool:
        """Drop a key's record; False when there is none. Until `sync` a crash may bring it back."""
        with self._lock:
            record = self._order.get((key, space))
            if record is None:
                return False
            self._retire(record)
            return True

    def set_expiry(self, key: bytes, space: int, expire_at_ms: int) -> bool:
        """Note when a block shall be gone (0 = never); False when it is not on disk."""
        with self._lock:
            record = self._order.get((key, space))
            if record is None:
                return False
            record.expire_at_ms = expire_at_ms
            self._changes[record.name] = record
            return True

    def records(self) -> Iterator[Record]:
        """Every record, coldest first, as of now."""
        with self._lock:
            return iter(list(self._order.values()))

    def __len__(self) -> int:
        return len(self._order)

    @property
    def limit_bytes(self) -> int:
        """What the segments may come to."""
        return self.geometry.count * self.geometry.segment_bytes

    @property
    def file_bytes(self) -> int:
        """What the segments come to now, free room in them included."""
        return len(self._segments) * self.geometry.segment_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte of every segment is accounted for, once. Waits for who is settling."""
        with self._settling, self._lock:
            self._allocator.check_integrity()
            live = [record.extent for record in self._order.values()]
            assert sum(extent.length for extent in live) == self.live_bytes
            retired = [record.extent for record in (*self._retiring, *self._lingering)]
            taken = sorted([*live, *retired, *self._reserved, *self._set_aside, *self._allocator.holes()])
            stride = self.geometry.stride_bytes
            for number in range(self.geometry.count):
                pieces = [extent for extent in taken if extent.offset // stride == number]
                at = number * stride
                for extent in pieces:
                    assert extent.offset == at, f"{at} is lost or has two owners"
                    at += extent.length
                expected = self.geometry.segment_bytes if number in self._segments else 0
                assert at - number * stride == expected, "a segment is not fully accounted for"
            assert all(record.name == name for name, record in self._order.items())
            assert all(self._changes[record.name] is not record for record in self._retiring)
            assert self.file_bytes <= self.limit_bytes

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _take(self, nbytes: int) -> Extent | None:
        extent = self._allocator.allocate(nbytes)
        if extent is not None:
            self._reserved.add(extent)
        return extent

    def _retire(self, record: Record) -> None:
        """Let a record go; its extent is free once the index knows and nobody reads it."""
        del self._order[record.name]
        self.live_bytes -= record.extent.length
        self._changes[record.name] = None
        self._retiring.append(record)

    def _put_in_quarantine(self, record: Record, reason: str) -> None:
        del self._order[record.name]
        self.live_bytes -= record.extent.length
        self._changes[record.name] = None
        self._quarantine.append(Quarantined(record, reason))
        self._set_aside.append(record.extent)
        self.stats.quarantined += 1

    def _evict(self, nbytes: int) -> list[Record] | None:
        """Let the coldest records go between which `nbytes` will be free; None when even all of them would not do."""
        found = self._allocator.window(nbytes, (each for each in self._order.values() if not each.readers))
        if found is None:
            return None
        for record in found[1]:
            self._retire(record)
            self.stats.evicted += 1
            self.stats.evicted_bytes += record.extent.length
        return found[1]
