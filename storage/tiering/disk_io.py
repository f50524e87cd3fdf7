"""What one of the disk's threads does for one block: write it out, or read it in.

Bytes move without any lock. What came of it becomes true in the store afterwards, and only if the entry is still the
one that was meant: a block that was deleted, written over or renamed on its way loses nothing but the way. While it is
written a block is held like a reader's, so its bytes stay; while it is read its extent is a reservation.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Final, NamedTuple

from kvredis.storage.database import unplaced
from kvredis.storage.disk.segment import HEADER_BYTES, Facts, Record, record_bytes, scratch
from kvredis.storage.disk.superseded import Superseded
from kvredis.storage.disk.tier import TOGETHER_BYTES_MAX, DiskTier
from kvredis.storage.entry import INLINE_BYTES_MAX, NOWHERE, PAYLOAD_OFFSET_BYTES, Entry, extent_length
from kvredis.storage.errors import KVRedisError
from kvredis.storage.memory.allocator import Extent
from kvredis.storage.state import INLINE_LOOK_ENTRIES_MAX, StoreState
from kvredis.storage.stats import TierStats
from kvredis.storage.tensor_facts import tokens_of
from kvredis.storage.tier_protocols import DeviceBlock

from .transfers import NoRoom

assert HEADER_BYTES == PAYLOAD_OFFSET_BYTES, "a record is an extent's own image"

ROOM_TRIES: Final = 64
"""How often a block that comes back makes room that others take before it gives up."""


PUBLISHED_AT_ONCE: Final = 32
PUBLISH_PAUSE_S: Final = 0.0001
"""How many entries are published under one lock, half a millisecond, and how long others have it then."""


class _Block(NamedTuple):
    """What is written of an entry: its bytes, inline, in the arena or on the GPU, and the records that it is to
    supersede."""

    facts: Facts
    value: bytes | None
    extent: Extent
    instead: Sequence[Record]
    on_gpu: DeviceBlock | None


def _is_in_arena(block: _Block) -> bool:
    return block.value is None and block.on_gpu is None


class BlockLost(KVRedisError):
    """What the transfer of a block ends with that the disk no longer has, or not as it was."""

    def __init__(self) -> None:
        super().__init__("the block could not be read from disk, was not what had been written, or has just left it")


class DiskIo:
    """Carries the blocks of one store to its disk and back. Its methods block and belong on I/O threads; none is called
    with the store's lock held, but for `let_go`."""

    def __init__(self, store: StoreState, disk: DiskTier, superseded: Superseded, stats: TierStats) -> None:
        self.failing = False
        """The last write came to nothing."""
        self.stalled = False
        """A caller has waited in vain for a write; the next one that succeeds clears it."""
        self.written_s = store.now_s()
        """When a block has last reached the disk."""
        self.written = threading.Condition(store.lock)  # type: ignore[arg-type]  # it is a Lock in all that it needs
        """Notified after every attempt to write a block."""
        self.on_room: Callable[[], None] | None = None
        self.pushed_out = 0
        """The highest number of a write that memory has alone again, since a save has last made this 0."""
        self._store = store
        self._disk = disk
        self._superseded = superseded
        self._stats = stats
        self._writing: set[Entry] = set()

    def parcels(self, entries: Iterable[Entry]) -> Iterator[list[Entry]]:
        """Unsaved entries as `write_out` takes them: as many small ones, or others, as are written together; in their
        order."""
        small_bytes_max = min(TOGETHER_BYTES_MAX, self._disk.geometry.segment_bytes)
        for is_small, alike in groupby(entries, lambda entry: entry.length < INLINE_BYTES_MAX):
            bytes_max = small_bytes_max if is_small else self._disk.run_bytes
            parcel: list[Entry] = []
            parcel_bytes = 0
            for entry in alike:
                nbytes = record_bytes(entry.length)
                if parcel and parcel_bytes + nbytes > bytes_max:
                    yield parcel
                    parcel, parcel_bytes = [], 0
                parcel.append(entry)
                parcel_bytes += nbytes
            yield parcel

    def write_out(self, parcel: Sequence[Entry]) -> list[bool]:
        """Write a parcel to disk, here and now; for a save that wants entries which others have replaced, those others.
        For each entry True when it, or the other one, is on disk, or was deleted."""
        store = self._store
        with self.written:
            while not self._writing.isdisjoint(latest := [self._latest(each) for each in parcel]):
                self.written.wait()  # another thread is at it
            unsaved = filter(store.is_unsaved, dict.fromkeys(latest))
            going = [each for each in unsaved if self._disk.storable(each.key, each.length)]
            for entry in set(going).difference(parcel):
                self._superseded.replaced.write_instead(entry)
            blocks = [
                _Block(
                    *(Facts(each.key, each.space, each.length, each.expire_at_ms), each.value, each.extent),
                    tuple(self._superseded.of(each)),
                    None if each.is_resident or store.gpu is None else store.gpu.hold(each),
                )
                for each in going
            ]
            for entry in going:
                entry.leases += 1
                store.leases += 1
            self._writing.update(going)
        records: Sequence[Record | None] = [None] * len(going)
        left = dict.fromkeys(going)  # not by `_writing`, where another thread may have entered one of them again
        began_s = store.now_s()
        try:
            if going:
                records = self._write_together(blocks) or [self._write(block) for block in blocks]
            self._publish_all(left, records)
        finally:
            with self.written:
                self._writing.difference_update(left)
                for block in blocks:
                    if block.on_gpu is not None:
                        block.on_gpu.unhold()
                for entry in left:  # what stopped this is on its way to the caller
                    self._publish(entry, None)
                    store.unhold(entry)
                if going:
                    self.failing = None in records
                    self._stats.spilling.add(store.now_s() - began_s)
                if any(records):
                    self.stalled, self.written_s = False, store.now_s()
                safe = [not store.is_unsaved(self._latest(each)) for each in parcel]
                self.written.notify_all()
        if self.on_room is not None:
            self.on_room()
        return safe

    def _latest(self, entry: Entry) -> Entry:
        """What is in an entry's place, as far as a save wants to know."""
        successor = None if self._store.is_unsaved(entry) else self._superseded.replaced.by(entry)
        return entry if successor is None else successor

    def _publish_all(self, left: dict[Entry, None], records: Sequence[Record | None]) -> None:
        """Have what was written be true, or not, a few entries at a time: the event loop waits for the lock. Takes out
        of `left` what it is done with."""
        written = list(zip(left, records, strict=True))
        for at in range(0, len(written), PUBLISHED_AT_ONCE):
            if at:
                time.sleep(PUBLISH_PAUSE_S)
            with self.written:
                for entry, record in written[at : at + PUBLISHED_AT_ONCE]:
                    self._publish(entry, record)
                    self._store.unhold(entry)
                    self._writing.discard(entry)
                    del left[entry]

    def _write_together(self, blocks: list["_Block"]) -> Sequence[Record] | None:
        """Write blocks side by side; None where they are not all alike, since one of a parcel may have been replaced by
        another kind meanwhile, or where it came to nothing."""
        if len(blocks) < 2:
            return None
        evict = self._store.disk_evicts
        small = [(block.facts, block.value) for block in blocks if block.value is not None]
        images = [(block.facts, self._image(block.extent)) for block in blocks if _is_in_arena(block)]
        records: Sequence[Record] | None = None
        left: Sequence[Record] = ()
        if len(small) == len(blocks):
            instead = [record for block in blocks for record in block.instead]
            records, left = self._disk.write_together(small, evict=evict, instead=instead)
        elif len(images) == len(blocks):
            records, left = self._disk.write_run(images, evict=evict)
        self._have_left(left)
        return records

    def _image(self, extent: Extent) -> memoryview:
        return self._store.arena.view[extent.offset : extent.offset + extent.length]

    def _write(self, block: "_Block") -> Record | None:
        facts, value, extent, instead, on_gpu = block
        if on_gpu is not None:
            image = scratch(facts.length)
            if not on_gpu.read(image[HEADER_BYTES : HEADER_BYTES + facts.length]):
                return None
        elif value is None:
            image = self._image(extent)
        else:
            image = scratch(facts.length)
            image[HEADER_BYTES : HEADER_BYTES + facts.length] = value  # O_DIRECT takes no bytes object
        place, left = self._disk.place(facts.length, evict=self._store.disk_evicts, instead=instead)
        self._have_left(left)
        return None if place is None else self._disk.write(place, image, facts)

    def _publish(self, entry: Entry, record: Record | None) -> None:
        """Let a record be that of its entry, if this is still what it was written for. Holds the store's lock."""
        store = self._store
        if record is None:
            self._stats.spill_failed += 1
            self._disk.give_up((entry.key, entry.space))
            return
        if not store.is_unsaved(entry):
            if not self._superseded.publish_replaced(entry, record, store.unsaved):
                self._disk.abandon(record.extent)
            return
        if (entry.key, entry.space) != record.name:  # it was renamed on its way
            record.rename(entry.key, unplaced(entry.space))
        if self._superseded.publish(entry, record):
            entry.record, record.write = record, store.write_of(entry)
            del store.unsaved[entry]
            if entry.expire_at_ms != record.expire_at_ms:
                self._disk.set_expiry(entry.key, entry.space, entry.expire_at_ms)
            self._stats.spilled += 1
            self._stats.spilled_bytes += record.length

    def _have_left(self, records: Sequence[Record]) -> None:
        """Let entries leave whose records the disk let go to make room, unless memory has them."""
        if not records:
            return
        store = self._store
        with store.lock:
            for record in records:
                # A record that has left keeps its name, but the database of its entry may have been exchanged since.
                named = (entries.get(record.key) for entries in store.index.spaces)
                entry = next((each for each in named if each is not None and each.record is record), None)
                if entry is not None:
                    self.let_go(entry)
                    if not store.at_hand(entry):
                        store.lapse(entry)

    def let_go(self, entry: Entry) -> None:
        """Let an entry have no record any more, so that it is to be written again. Holds the store's lock."""
        record, entry.record = entry.record, None
        if self._store.at_hand(entry):
            self._store.unsaved[entry] = self._store.writes
            if record is not None:
                self.pushed_out = max(self.pushed_out, record.write)

    def read_in(self, key: bytes, space: int, *, drop: bool) -> None:
        """Bring a block in. NoRoom when there is none; without `drop` no block leaves unwritten for it."""
        store = self._store
        with store.lock:
            entry = store.index.get(key, space)
            if entry is None or entry.is_resident or entry.record is None:
                return
            record = entry.record
        began_s = store.now_s()
        if record.length < INLINE_BYTES_MAX:
            extent, image = NOWHERE, scratch(record.length)
            self._make_inline_room(entry.memory_bytes + record.length)
        else:
            room = self.room(extent_length(record.length), drop=drop)
            if room is None:
                raise NoRoom
            extent = room
            image = self._image(extent)
        intact = None  # an exception tells nothing of the record
        lost = False
        try:
            intact = self._disk.read(record, image)
        finally:
            with store.lock:
                if extent is not NOWHERE:
                    store.reserved_bytes -= extent.length
                if intact and self._arrive(entry, record, extent, image):
                    self._stats.promoting.add(store.now_s() - began_s)
                    if drop:  # then it is a demand
                        self._stats.demanded += 1
                        self._stats.demanded_tokens += entry.tokens
                elif extent is not NOWHERE:
                    store.allocator.free(extent)
                if intact is False:
                    lost = self._lose(entry, record)
        if lost:
            raise BlockLost

    def _arrive(self, entry: Entry, record: Record, extent: Extent, image: memoryview) -> bool:
        """Let a block that has come in be its entry's. False when it is not wanted any more, or is there. Holds the
        store's lock."""
        store = self._store
        if not self._is_meant(entry, record) or entry.is_resident:
            return False
        store.away -= 1
        self._stats.promoted += 1
        self._stats.promoted_bytes += entry.length
        if extent is NOWHERE:
            entry.value = bytes(image[HEADER_BYTES : HEADER_BYTES + entry.length])  # readers share bytes without a hold
            store.inline_bytes += entry.memory_bytes
            store.inline_policy.admit(entry)
            if store.inline_bytes > store.inline_bytes_high:
                store.evict_inline(entry)
        else:
            entry.extent = extent
            entry.tokens = tokens_of(image[HEADER_BYTES : HEADER_BYTES + entry.length])
            store.live_bytes += extent.length
            store.policy.admit(entry)
        return True

    def _lose(self, entry: Entry, record: Record) -> bool:
        """Note that the disk has let go of a record, which was not what had been written, or has just made room. False
        when it is not missed. Holds the store's lock."""
        if not self._is_meant(entry, record):
            return False
        self.let_go(entry)
        if not self._store.at_hand(entry):
            self._stats.lost += record.damaged
            self._store.lapse(entry)
        return True

    def _is_meant(self, entry: Entry, record: Record) -> bool:
        """Whether a record that was read is still that of an entry, and this still in the index."""
        return entry.record is record and self._store.index.get(entry.key, entry.space) is entry

    def room(self, nbytes: int, *, drop: bool) -> Extent | None:
        """An extent for a block that comes in, the caller's as a reservation; a block that must be written for it is
        written by this thread, which waits for no other."""
        store = self._store
        for _ in range(ROOM_TRIES):
            with store.lock:
                extent = store.place(nbytes, drop=False)
                if extent is not None:
                    store.reserved_bytes += nbytes
                    return extent
                standing = [each for each in store.standing_at(nbytes) if not store.may_leave(each)]
            if not standing or not all(self.write_out([entry])[0] for entry in standing):
                break
        if not drop:
            return None
        with store.lock:
            extent = store.place(nbytes)
            if extent is not None:
                store.reserved_bytes += nbytes
            return extent

    def _make_inline_room(self, nbytes: int) -> None:
        """The same for a small value: those are written that would have to leave for it."""
        store = self._store
        standing = []
        with store.lock:
            excess = store.inline_bytes + nbytes - store.inline_bytes_high
            if excess > 0:
                for entry in islice(store.victims(store.inline_policy), INLINE_LOOK_ENTRIES_MAX):
                    if store.is_due(entry):
                        standing.append(entry)
                    excess -= entry.memory_bytes
                    if excess <= 0:
                        break
        for parcel in self.parcels(standing):
            self.write_out(parcel)
