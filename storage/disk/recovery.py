"""How a directory becomes a disk tier again: after a clean stop, after a crash, and after its files were changed.

The index says what is there; here only what is cheap and certain is checked (is the segment there, is it long enough,
does nothing overlap, has the time not come), so that a hundred thousand records take well under a second. Whether the
bytes are the right ones is checked whenever they are read. Which values a crash brings back is said in superseded.py.

What cannot be used is thrown away when it is a cache that we wrote: an index that is damaged, and one of an older
format. A newer kvredis' directory, another program's database and a directory that another server has open are refused.
"""

import errno
import gc
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from operator import attrgetter, itemgetter
from pathlib import Path

from kvredis.storage.database import SPACES
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.allocator import GRAIN_BYTES, Allocator, Extent

from .files import File, Files
from .index import INDEX_NAMES, Batch, DiskIndex, Unusable, is_damage
from .segment import SEGMENTS_MAX, Geometry, Record, default_segment_bytes, geometry, segment_name, segment_number

log = logging.getLogger(__name__)

LIMIT_BYTES_MAX = (1 << 48) - (1 << 30)
"""Of a disk tier: 256 TiB less a GiB. Where its free room begins is a number of 36 bits then, and how long it is in a
segment one of 28, of 4 KiB each (storage/_core.pyx, Holes); the GiB is more than lies between the segments."""
LOCK_NAME = "lock"
RECORDS_MAX = 4 * 1024 * 1024
_KEPT_SEGMENTS_MAX = 4 * SEGMENTS_MAX


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Where the disk tier lies and how much it may take; `source` is named in errors.

    A directory keeps the length of its segments when `limit_bytes` changes, as long as they fit; then up to one segment
    less than the limit is used; `segment_bytes` None chooses by the limit. No block may be longer than a segment. The
    index comes on top of the limit: some 150 bytes a record, and half a KiB of memory; `records_max` bounds both.
    """

    directory: Path
    limit_bytes: int
    direct: bool = True
    segment_bytes: int | None = None
    source: str = "DiskOptions"
    records_max: int = RECORDS_MAX

    def refuse(self, reason: str) -> ConfigError:
        """The error that says why this directory cannot be used."""
        return ConfigError("local_disk", str(self.directory), self.source, reason)


@dataclass(slots=True)
class Opened:
    """A directory, locked and read. `records` are in eviction order, coldest first: at first every row of the index."""

    files: Files
    directory: Path
    lock: File
    index: DiskIndex
    geometry: Geometry
    direct: bool
    fallback: str | None
    first_seq: int
    records: list[Record]
    records_max: int
    segments: dict[int, File] = field(default_factory=dict)
    dropped: int = 0

    def let_go(self) -> None:
        """Close index and segments as they are."""
        self.index.abandon()
        for file in self.segments.values():
            file.close()
        self.segments.clear()


def open_directory(options: DiskOptions, files: Files, now_ms: int) -> Opened:
    """Lock the directory, read its index and open its segments. Blocks; ConfigError when it cannot be used."""
    if options.limit_bytes < GRAIN_BYTES:
        reason = f"less than {GRAIN_BYTES} bytes hold nothing"
        raise ConfigError("max_local_disk_size", options.limit_bytes, options.source, reason)
    if options.limit_bytes > LIMIT_BYTES_MAX:
        log.warning("Disk tier: it has 256 TiB at most, and uses no more of the %d bytes given", options.limit_bytes)
        options = replace(options, limit_bytes=LIMIT_BYTES_MAX)
    with _no_collection(), ExitStack() as undo:
        try:
            opened = _open(options, files, undo)
            _recover(opened, now_ms)
        except OSError as error:
            raise options.refuse(f"cannot be used: {error.strerror or error}") from error
        except (Unusable, sqlite3.Error) as error:
            raise options.refuse(f"its index cannot be used: {error}") from error
        undo.pop_all()
    return opened


@contextmanager
def _no_collection() -> Iterator[None]:
    """Spare the garbage collector records that all stay: walking them again and again takes it 0.2 s of 0.7."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _open(options: DiskOptions, files: Files, undo: ExitStack) -> Opened:
    directory = options.directory
    files.make_directory(directory)
    lock = files.lock(directory / LOCK_NAME)
    if lock is None:
        raise options.refuse("another server has it open")
    undo.callback(lock.close)
    fallback = files.direct_obstacle(directory) if options.direct else "O_DIRECT was not asked for"
    if options.direct and fallback is not None:
        log.warning("Disk tier: buffered, since %s", fallback)
    try:
        index, cut, first_seq, rows = _load(options, files)
    except Unusable as unusable:
        if not unusable.ours:
            raise options.refuse(str(unusable)) from unusable
        log.warning("Disk tier: the contents of %s are discarded: %s", directory, unusable)
        _discard(directory, files)
        index, cut, first_seq, rows = _load(options, files)
    opened = Opened(
        *(files, directory, lock, index, cut, fallback is None, fallback, first_seq), rows, options.records_max
    )
    undo.callback(opened.let_go)
    files.sync_directory(directory)  # the index' own files were made a moment ago
    return opened


def _load(options: DiskOptions, files: Files) -> tuple[DiskIndex, Geometry, int, list[Record]]:
    """Open the index and read all of it: how the disk is cut, the first sequence number, every row."""
    index = DiskIndex.open(options.directory, files)
    with ExitStack() as undo:
        undo.callback(index.abandon)
        try:
            if (trouble := index.trouble()) is not None:
                raise Unusable(f"its index is damaged: {trouble}", ours=True)
            cut = geometry(options.limit_bytes, options.segment_bytes or default_segment_bytes(options.limit_bytes))
            kept = index.segment_bytes()
            if kept:
                if not kept <= options.limit_bytes < kept * (_KEPT_SEGMENTS_MAX + 1) or kept % GRAIN_BYTES:
                    raise Unusable(f"its segments of {kept} bytes do not suit the limit", ours=True)
                cut = Geometry(kept, options.limit_bytes // kept)
            first_seq = index.begin_epoch(cut.segment_bytes)
            rows = index.rows(cut)
        except (sqlite3.Error, TypeError, ValueError) as error:
            # What Python makes of a row without a value, or with a word for a number, is damage too.
            raise Unusable(f"its index cannot be read: {error}", ours=is_damage(error)) from error
        undo.pop_all()
    return index, cut, first_seq, rows


def _discard(directory: Path, files: Files) -> None:
    """Throw away what we wrote. The index goes first: segments without one are merely room."""
    for name in INDEX_NAMES:
        files.remove(directory / name)
    for name in files.names(directory):
        if segment_number(name) is not None:
            files.remove(directory / name)


def _recover(opened: Opened, now_ms: int) -> None:
    """Open the segments that are there and keep the rows that they can bear out; the others leave the index."""
    lengths = {}
    for name in opened.files.names(opened.directory):
        number = segment_number(name)
        if number is None:
            continue
        if number >= opened.geometry.count:
            opened.files.remove(opened.directory / name)
            continue
        length = _open_segment(opened, number)
        if length is not None:
            lengths[number] = length
    rows = opened.records
    kept = _without_overlaps(_borne_out(rows, opened.geometry, lengths, now_ms))
    kept = kept[max(0, len(kept) - opened.records_max) :]
    if len(kept) < len(rows):
        gone = Batch()
        for row_name in {row.name for row in rows}.difference(row.name for row in kept):
            gone.note(row_name, None)
        opened.index.apply(gone, opened.geometry, durable=False)
    opened.records, opened.dropped = kept, len(rows) - len(kept)


def _open_segment(opened: Opened, number: int) -> int | None:
    """Open a segment and give the bytes it was found with; None, and it counts as missing, when it cannot be used.
    OSError when the process may open no more files."""
    path = opened.directory / segment_name(number)
    file = None
    try:
        file = opened.files.open(path, direct=opened.direct)
        length = file.size_bytes()
        if length > opened.geometry.segment_bytes:  # left over from another limit, by a start that was cut short
            file.close()
            opened.files.remove(path)
            return None
        if length < opened.geometry.segment_bytes:
            file.allocate(opened.geometry.segment_bytes)
    except OSError as error:
        if file is not None:
            file.close()
        if error.errno in (errno.EMFILE, errno.ENFILE):  # the fault of a limit: its rows would be thrown away for it
            raise
        log.warning("Disk tier: %s cannot be used: %s", path, error.strerror or error)
        return None
    opened.segments[number] = file
    return length


def _borne_out(rows: list[Record], cut: Geometry, lengths: dict[int, int], now_ms: int) -> list[Record]:
    """The rows that can be: in a segment that is there and was long enough, and whose time has not come."""
    stride_bytes = cut.stride_bytes
    ends = {number: number * stride_bytes + min(length, cut.segment_bytes) for number, length in lengths.items()}
    return [
        row
        for row in rows
        if row.length >= 0
        and 0 <= row.space < SPACES
        and row.extent.offset >= 0
        and row.extent.offset % GRAIN_BYTES == 0
        and row.extent.offset + row.extent.length <= ends.get(row.extent.offset // stride_bytes, -1)
        and not 0 < row.expire_at_ms <= now_ms
    ]


def _without_overlaps(records: Sequence[Record]) -> list[Record]:
    """Of two records that overlap the newer one: it was written last. The order stays."""
    dropped = set()
    end, last = 0, None
    for record in sorted(records, key=attrgetter("extent.offset")):
        if last is not None and record.extent.offset < end:
            loser = min(last, record, key=lambda each: each.seq)
            dropped.add(loser.name)
            if loser is record:
                continue
        last, end = record, record.extent.offset + record.extent.length
    return [record for record in records if record.name not in dropped] if dropped else list(records)


def free_room(opened: Opened) -> Allocator:
    """The allocator over all segments, in which all is taken but the gaps between records in segments that are open."""
    stride, segment_bytes = opened.geometry.stride_bytes, opened.geometry.segment_bytes
    allocator = Allocator(opened.geometry.count * stride, segment_bytes)
    taken = [record.extent for record in opened.records]
    taken += [Extent(number * stride + segment_bytes, 0) for number in opened.segments]
    taken.sort(key=itemgetter(0))
    starts = {number: number * stride for number in opened.segments}
    for offset, length in taken:
        number = offset // stride
        if offset > starts[number]:
            allocator.free(Extent(starts[number], offset - starts[number]))
        starts[number] = offset + length
    return allocator
