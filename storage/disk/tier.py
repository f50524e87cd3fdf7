"""The disk tier: blocks that memory had no room for, as records in a few large files.

What it promises: a record that `sync` has confirmed is there after a kill or a loss of power unless it was forgotten or
evicted since, or replaced by one that is there; and nothing is ever read that is not, to the bit, what was written
under that key. The first rests on an order: `sync` makes rows durable only after their payloads; the row of a block
that has left is gone from the index before its extent is used again, and durably so where another record has taken the
place of a confirmed one, or databases were exchanged. The second on checking every record whenever it is read; one that
is not as it should be leaves for the quarantine, its extent stays unused until the next start, and the read is a miss.

Two kinds of methods. Those that decide (`publish`, `abandon`, `get`, `touch`, `supersede`, `forget`, `rename`, `swap`,
`clear`, `set_expiry` ...: see state.py) take one short lock, never wait for a device and suit the event loop.
Those that do (`place`, `write`, `read`, `settle`, `sync`, `close`) block and belong on an I/O thread. What was decided
reaches the index in batches, through `settle`: a crash forgets what was not settled, as it forgets what memory held.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Iterable, Sequence
from errno import ENOENT, ENOSPC
from itertools import islice
from pathlib import Path
from typing import Self

from kvredis.storage.memory.allocator import Extent, windows

from .files import Files, RealFiles
from .recovery import LOCK_NAME, DiskOptions, Opened, open_directory
from .segment import HEADER_BYTES, Facts, Name, Record, fault, record_bytes, scratch, seal, segment_name
from .state import DiskState, DiskStats

__all__ = ["DiskOptions", "DiskStats", "DiskTier"]

log = logging.getLogger(__name__)

CHANGES_HIGH = 256
REPLACING_PART = 16
"""Changes that may wait for the index before the next write settles them; so many times as many when that waits for
the device."""

PLACE_TRIES = 8
RUN_TRIES = 4
"""How often `place` makes room that others take before it gives up, and `write_run`, which has another way."""

GROW_PAUSE_TRIES = 256
"""How many blocks are placed without asking for a segment again, after the device had no room for one."""

FREED_AT_ONCE = 32
"""Extents that become free under one lock: some 10 us each where free room is in a hundred thousand pieces."""

CLEARED_AT_ONCE = 256
"""Records of databases that were cleared which leave under one lock: half a millisecond."""

TOGETHER_BYTES_MAX = 1024 * 1024
"""What short blocks that are written together may come to."""

RUN_BYTES_MAX = 9 * 1024 * 1024
RUN_PART = 64
"""What blocks of the arena that are written together may come to, and no more than a 64th of the disk: four of 2 MiB.
On hugepages a write costs a call, not bytes: 18 ms of CPU per GB by 2 MiB, 8 by 8 MiB."""

_LOG_LINES_MAX = 50
"""Failures told of one by one; a dying disk has too many to tell. All are counted."""


class DiskTier(DiskState):
    """One directory of records, held by this process alone. Safe to use from several threads."""

    def __init__(self, opened: Opened) -> None:
        super().__init__(opened)
        self._directory: Path = opened.directory
        self._files = opened.files
        self._held = opened.lock
        self._index = opened.index
        self._looking = threading.Lock()  # for room among all records: one thread at a time; taken before the others
        self._unsynced = set(opened.segments)  # a server that was killed may have left pages to the kernel
        self._loose = False  # whether the index holds commits that a loss of power would undo
        self.distrusted = False
        """The device has once refused to sync: see `sync`."""
        self.answers = 0
        """How often the device has answered a write or a sync; it stands still while that hangs."""
        self._grow_pause = 0
        self._log_lines = 0
        self._closed = False

    @classmethod
    def open(cls, options: DiskOptions, files: Files | None = None, now_ms: int | None = None) -> Self:
        """Open or make a disk tier. Blocks; ConfigError when the directory cannot be used, or another server uses it.

        Blocks whose time has come at `now_ms` (Unix time; None = now) are not taken over.
        """
        now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
        return cls(open_directory(options, files or RealFiles(), now_ms))

    def place(
        self, length: int, *, evict: bool = True, count: int = 1, instead: Sequence[Record] = ()
    ) -> tuple[Extent | None, list[Record]]:
        """Room for the record of a payload of `length` bytes; it ends in `write`, or in `abandon`. For want of it
        another segment is begun, or, with `evict`, the coldest records leave. `count` records will lie there. When that
        does not make room either, superseded records leave: with `evict` all that must, else those in `instead`, which
        the block is to supersede.

        Gives the extent and the records that had to leave for it, also when there is none in the end: the disk is full
        of records that are being read or written, or the block is longer than a segment, or the index cannot be
        written. Records leave for want of room for one more row, too.
        """
        nbytes = record_bytes(length)
        left: list[Record] = []
        if nbytes <= self.geometry.segment_bytes:
            for _ in range(PLACE_TRIES):
                with self._lock:
                    if self._excess(count) > 0:
                        leaving = self._evict(nbytes, count) if evict else None
                        if leaving is None:
                            leaving = self._give_way(nbytes, count, instead, evict=evict)
                        if leaving is None:
                            break
                        left += leaving
                    extent = self._take(nbytes, count)
                    waiting = bool(self._retiring or self._freeing or self._cleared)
                    segments = len(self._segments)
                if extent is not None:
                    return extent, left
                if self._grow(segments):
                    continue
                with self._lock:
                    spared = not evict or self._spares()
                    if spared and self._acquit():
                        continue
                if not waiting:
                    if spared and evict:
                        break
                    extent, leaving = self._make_room(nbytes, count, instead, evict=evict)
                    if extent is not None:
                        return extent, left
                    if leaving is None:
                        break
                    left += leaving
                if not self.settle() and not (self.give_up() and self.settle()):
                    break
        with self._lock:
            self.stats.no_room += 1
        return None, left

    def write(self, extent: Extent, image: memoryview, facts: Facts) -> Record | None:
        """Write a block to the extent that was reserved for it; `publish` or `abandon` (its extent) comes next.

        `image` is page-aligned, at least as long as the extent, and has the payload HEADER_BYTES behind its start;
        those first bytes are overwritten, and the payload does not change meanwhile. None: not storable, or the
        device refused; the extent is given back then.
        """
        if not self.storable(facts.key, facts.length) or record_bytes(facts.length) != extent.length:
            self.abandon(extent)
            return None
        with self._lock:
            seq = self._next_seq()
        (checksum,) = seal([(facts, image)], [seq])
        if not self._put(extent, [image[: extent.length]], 1):
            return None
        return Record.of(facts, extent, seq, checksum)

    def write_together(
        self, blocks: Sequence[tuple[Facts, bytes]], *, evict: bool = True, instead: Sequence[Record] = ()
    ) -> tuple[list[Record] | None, list[Record]]:
        """Place and write storable blocks side by side, in one piece: a device takes as long for one of a page.

        Gives a record for each block, to be published or abandoned one by one, or None when it came to nothing; and who
        had to leave; `evict` and `instead` are as in `place`. The blocks may come to TOGETHER_BYTES_MAX, headers
        included, and to no more than a segment has.
        """
        lengths = [record_bytes(facts.length) for facts, _ in blocks]
        whole, left = self.place(sum(lengths) - HEADER_BYTES, evict=evict, count=len(blocks), instead=instead)
        if whole is None:
            return None, left
        image = scratch(whole.length - HEADER_BYTES)
        at = 0
        images = []
        for (facts, value), nbytes in zip(blocks, lengths, strict=True):
            images.append((facts, image[at : at + nbytes]))
            image[at + HEADER_BYTES : at + HEADER_BYTES + facts.length] = value  # O_DIRECT takes no bytes object
            at += nbytes
        return self._write_side_by_side(whole, images, [image]), left

    @property
    def run_bytes(self) -> int:
        """What the records may come to that `write_run` takes."""
        return min(RUN_BYTES_MAX, self.limit_bytes // RUN_PART, self.geometry.segment_bytes)

    def write_run(
        self, blocks: Sequence[tuple[Facts, memoryview]], *, evict: bool = True
    ) -> tuple[list[Record] | None, list[Record]]:
        """Place and write storable blocks, IOV_MAX at most, side by side in one system call: each by its image, as for
        `write`, and together `run_bytes` at most.

        Gives what `write_together` gives. None also where there is no room for all in one piece, nor would be between
        some of the coldest: then the caller places them one by one.
        """
        whole, left = self._place_run(sum(record_bytes(facts.length) for facts, _ in blocks), len(blocks), evict=evict)
        if whole is None:
            return None, left
        images = [(facts, image[: record_bytes(facts.length)]) for facts, image in blocks]
        return self._write_side_by_side(whole, images, [image for _, image in images]), left

    def _place_run(self, nbytes: int, count: int, *, evict: bool) -> tuple[Extent | None, list[Record]]:
        """Room for a run, as it can be had without one block that is not among the coldest leaving."""
        left: list[Record] = []
        if nbytes > self.geometry.segment_bytes:
            return None, left
        for _ in range(RUN_TRIES):
            with self._lock:
                extent = self._take(nbytes, count)
                waiting = bool(self._retiring or self._freeing or self._cleared)
                segments = len(self._segments)
            if extent is not None:
                return extent, left
            if self._grow(segments):
                continue
            if not waiting:
                with self._lock:
                    leaving = self._evict_runs(nbytes, count) if evict and not self._refused_in_a_row else None
                if leaving is None:
                    break
                left += leaving
            if not self.settle():
                break
        return None, left

    def _write_side_by_side(
        self, whole: Extent, images: Sequence[tuple[Facts, memoryview]], pieces: Sequence[memoryview]
    ) -> list[Record] | None:
        """Seal blocks by their images and write them to an extent that is just as long as all; `pieces` are the images
        as they lie in memory. None, and the extent given back, when the device refuses."""
        records = []
        offset = whole.offset
        with self._lock:
            seqs = [self._next_seq() for _ in images]
        for (facts, image), seq, checksum in zip(images, seqs, seal(images, seqs), strict=True):
            records.append(Record.of(facts, Extent(offset, len(image)), seq, checksum))
            offset += len(image)
        if not self._put(whole, pieces, len(images)):
            return None
        with self._lock:
            self._reserved.remove(whole)
            self._reserved.update(record.extent for record in records)
        return records

    def read(self, record: Record, into: memoryview) -> bool:
        """Read a record into page-aligned memory at least as long as its extent, payload HEADER_BYTES behind its start.

        True: the payload is what was written. False, and `into` holds anything: the record is gone, or it was found
        damaged and has just been put into quarantine. The record may be forgotten while it is read: that is still True.
        """
        with self._lock:
            if record not in self._order or record.database.flushed:
                return False
            record.readers += 1
            name = record.written_as
        number, offset = self.geometry.locate(record.extent)
        failed = reason = None
        try:
            count = self._segments[number].pread(into[: record.extent.length], offset)
            reason = fault(into, record, name) if count == record.extent.length else "the segment is too short"
        except OSError as error:
            failed = reason = error.strerror or str(error)
        finally:
            with self._lock:
                record.readers -= 1
                if record.retired and not record.readers:
                    self._lingering.remove(record)
                    self._allocator.free(record.extent)
        with self._lock:
            self.stats.read += reason is None
            self.stats.read_bytes += 0 if reason else record.extent.length
            self.stats.read_errors += failed is not None
            if reason is not None and record in self._order:
                self._put_in_quarantine(record, reason)
        if reason is not None:
            self._complain("quarantined, a miss: %s at %d: %s", segment_name(number), offset, reason)
        return reason is None

    def settle(self) -> bool:
        """Bring the index up to date, so that a killed process comes back with this; extents that are free by it can
        be used again. Waits for the device when a confirmed record was replaced: the new one must be there for certain
        before the old one's room is used. False, and nothing has changed: the index could not be written, or is not to
        learn of anything yet (`untrue`)."""
        with self._settling:
            self.decide()
            return self._settle(durable=False)

    def sync(self) -> bool:
        """Have all that was published or forgotten before the call survive any crash. False: it may not.

        After a device has once refused to sync, nothing more is confirmed until the next start: what the kernel did
        with the pages that it could not write is not known.
        """
        with self._settling:
            self.decide()
            return self._sync()

    def close(self, order: Iterable[Name] | None = None) -> None:
        """Make everything durable, note the order of eviction and let go of the directory; again is nothing.

        `order` names blocks as (key, space), coldest first; one that is not named keeps an earlier place. None: the
        tier's own order. No other method may run meanwhile or be called afterwards.
        """
        if self._closed:
            return
        self._closed = True
        ranks = list(self._order)
        if order is not None:
            named = dict.fromkeys(record for name in order if (record := self.get(*name)) is not None)
            ranks = [*(record for record in ranks if record not in named), *named]
        with self._settling:
            self.decide()
            if not self._sync():
                log.warning("Disk tier: what was written last may be missing at the next start")
            try:
                self._index.close([record.seq for record in ranks])
            except sqlite3.Error as error:
                log.warning("Disk tier: the order of eviction could not be kept: %s", error)
        for file in self._segments.values():
            file.close()
        self._held.close()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _make_room(
        self, nbytes: int, count: int, instead: Sequence[Record], *, evict: bool
    ) -> tuple[Extent | None, list[Record] | None]:
        """An extent, if there is one by now, or the records that have left so that there will be; None when it cannot
        be."""
        leaving = None
        with self._lock:
            extent = self._take(nbytes, count)  # another thread may have made room meanwhile
            if extent is None and evict:
                leaving = self._evict_some(nbytes, count)
        if extent is None and leaving is None and evict:
            leaving = self._evict_afar(nbytes)
        if extent is None and leaving is None:
            with self._lock:
                leaving = self._give_way(nbytes, count, instead, evict=evict)
        return extent, leaving

    def _evict_afar(self, nbytes: int) -> list[Record] | None:
        """As `_evict_some`, among all records: where many short ones lie otherwise than in the order in which they
        leave, it takes a step for most of them. So it is done without the lock, for which the event loop may wait."""
        with self._looking:
            with self._lock:
                holes, records = self._allocator.spans(), list(self._order)
            idle = filter(self._may_leave, records)
            found = list(islice(windows(nbytes, idle, holes), self._evicted_at_once(nbytes)))
            with self._lock:
                leaving = [each for run in found for each in run if each in self._order and self._may_leave(each)]
                self._let_leave(leaving)
        return leaving if found else None

    def _put(self, extent: Extent, pieces: Sequence[memoryview], count: int) -> bool:
        """Write `count` sealed records, which lie in `pieces`, to their extent; False, and the extent given back, when
        the device refuses."""
        if len(self._pending) >= CHANGES_HIGH * (REPLACING_PART if self.replaces else 1):
            self.settle()
        number, offset = self.geometry.locate(extent)
        try:
            self._segments[number].pwritev(pieces, offset)
        except OSError as error:
            with self._lock:
                self.answers += 1
                self.stats.write_errors += 1
                self._reserved.remove(extent)
                self._coming -= count
                self._suspect(extent, refused=error.errno != ENOSPC)
            self._complain("a record could not be written to %s: %s", segment_name(number), error.strerror or error)
            return False
        with self._lock:
            self.answers += 1
            self._unsynced.add(number)
            self._convict()
            self.stats.written += count
            self.stats.written_bytes += extent.length
        return True

    def _grow(self, seen: int) -> bool:
        """Begin another segment, if limit and device let us; True also when there are more than `seen` by now."""
        with self._settling:
            if len(self._segments) > seen:
                return True
            number = next((each for each in range(self.geometry.count) if each not in self._segments), None)
            if number is None or self._grow_pause:
                self._grow_pause -= number is not None
                return False
            path = self._directory / segment_name(number)
            file = None
            try:
                if not self._held.is_at(self._directory / LOCK_NAME):  # what is there now may be another server's
                    raise OSError(ENOENT, "the directory, or the lock in it, was moved or removed")
                file = self._files.open(path, direct=self.direct)
                file.allocate(self.geometry.segment_bytes)
                self._files.sync_directory(self._directory)
            except OSError as error:
                self._grow_pause = GROW_PAUSE_TRIES
                self._complain("no further segment, %s: %s", path, error.strerror or error)
                if file is not None:
                    file.close()
                    self._discard(path)
                return False
            with self._lock:
                self._segments[number] = file
                self._allocator.free(Extent(number * self.geometry.stride_bytes, self.geometry.segment_bytes))
            return True

    def _discard(self, path: Path) -> None:
        """Remove what became of a segment that could not be had in full."""
        try:
            self._files.remove(path)
        except OSError as error:
            self._complain("%s cannot be removed: %s", path, error.strerror or error)

    def _sync(self) -> bool:
        with self._lock:
            idle = not (self._unsynced or self._pending or self._loose or self._undecided)
        return (idle or self._settle(durable=True)) and not self.distrusted

    def _settle(self, *, durable: bool) -> bool:
        while self._let_some_go():
            time.sleep(0)
        with self._lock:
            if self.waits:
                return False
            begun = self._begin_learning()
            batch = begun.batch
            self._freeing, self._retiring = self._retiring, []
            durable = (durable or batch.replaces) and not self.distrusted
            unsynced = self._unsynced if durable else set()
            self._unsynced = self._unsynced - unsynced
            generation = self._generation
            self._generation += 1
        try:
            durable = durable and self._sync_segments(unsynced)
            if batch or durable:
                self._index.apply(batch, self.geometry, durable=durable)
                self._loose = not durable
            if durable:
                self._confirmed = generation
        except BaseException as error:  # whatever it is: a sync that found nothing pending would confirm what was lost
            with self._lock:
                self._unsynced |= unsynced
                self._end_learning(begun, learned=False)
                self._retiring += self._freeing
                self._freeing = []
                self.stats.index_errors += 1
            if not isinstance(error, (sqlite3.Error, MemoryError)):  # SQLite's want of memory is the latter
                raise
            self._complain("the index could not be written: %s", str(error) or "out of memory")
            return False
        with self._lock:
            self._end_learning(begun, learned=True)
        self._free()
        return True

    def _let_some_go(self) -> bool:
        """Let go of some records of databases that were cleared; whether there may be more."""
        with self._lock:
            return self._retire_cleared(CLEARED_AT_ONCE)

    def _sync_segments(self, numbers: Iterable[int]) -> bool:
        """Have payloads on the device; False, from now on, when it refuses."""
        try:
            for number in sorted(numbers):
                self._segments[number].sync()
                self.answers += 1
        except OSError as error:
            self.distrusted = True
            with self._lock:
                self.stats.sync_errors += 1
            self._complain("the device does not confirm what was written: %s", error.strerror or error)
        return not self.distrusted

    def _free(self) -> None:
        """Give back the extents of records that the index knows nothing of any more, a few at a time: a thread that
        waits for the lock or the interpreter meanwhile gets it in between."""
        while self._freeing:
            with self._lock:
                for record in self._freeing[-FREED_AT_ONCE:]:
                    if record.readers:
                        record.retired = True
                        self._lingering.add(record)
                    else:
                        self._allocator.free(record.extent)
                del self._freeing[-FREED_AT_ONCE:]
            if self._freeing:
                time.sleep(0)

    def _complain(self, text: str, *what: object) -> None:
        self._log_lines += 1
        if self._log_lines <= _LOG_LINES_MAX:
            log.warning("Disk tier: " + text, *what)
