"""A disk tier of a few segments, and the shortest ways to put a block on it and to get it back."""

import random
from pathlib import Path

from kvredis.storage.disk.files import Files
from kvredis.storage.disk.index import row_of
from kvredis.storage.disk.segment import HEADER_BYTES, Facts, Record, record_bytes, scratch
from kvredis.storage.disk.tier import DiskOptions, DiskTier

KIB = 1024
SEGMENT_BYTES = 64 * KIB
SEGMENTS = 3


def options(directory: Path, segments: int = SEGMENTS, *, direct: bool = False) -> DiskOptions:
    """Room for 16 grains a segment."""
    return DiskOptions(directory, segments * SEGMENT_BYTES, direct, SEGMENT_BYTES)


def small_disk(directory: Path, files: Files | None = None, segments: int = SEGMENTS, now_ms: int = 0) -> DiskTier:
    """A tier in `directory`, made or opened again."""
    return DiskTier.open(options(directory, segments), files, now_ms)


def content(seed: object, length: int) -> bytes:
    """Bytes that no other seed has."""
    return random.Random(str(seed)).randbytes(length)


def image_of(payload: bytes) -> memoryview:
    """A payload where it lies in an extent."""
    image = scratch(len(payload))
    image[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    return image


def written(disk: DiskTier, key: bytes, payload: bytes, space: int = 0, expire_at_ms: int = 0) -> Record | None:
    """A block on disk that no reader can see yet; None when there was no room or the device refused."""
    extent, _ = disk.place(len(payload))
    if extent is None:
        return None
    return disk.write(extent, image_of(payload), Facts(key, space, len(payload), expire_at_ms))


def put(disk: DiskTier, key: bytes, payload: bytes, space: int = 0, expire_at_ms: int = 0) -> bool:
    """Write a block and publish it."""
    record = written(disk, key, payload, space, expire_at_ms)
    return record is not None and disk.publish(record)


def taken(disk: DiskTier, length: int) -> bool:
    """Take room for a payload out of what is free now, as a write that never comes; False when nothing is."""
    with disk._lock:
        return disk._take(record_bytes(length)) is not None


def got(disk: DiskTier, key: bytes, space: int = 0) -> bytes | None:
    """What a key holds; None for a miss."""
    record = disk.get(key, space)
    if record is None:
        return None
    into = scratch(record.length)
    if not disk.read(record, into):
        return None
    return bytes(into[HEADER_BYTES : HEADER_BYTES + record.length])


def index_agrees(disk: DiskTier) -> None:
    """Raise AssertionError unless the index, once settled, says of every record what memory says, and of no other."""
    assert disk.settle()
    assert disk.settle()  # a database that was exchanged, then cleared, goes on saying what the index has until then
    assert not disk.unsettled
    rows = {row.name: row_of(row) for row in disk._index.rows(disk.geometry)}
    assert rows == {record.name: row_of(record) for record in disk.records()}
    disk.check_integrity()


def keys(disk: DiskTier) -> list[bytes]:
    """Every key, coldest first."""
    return [record.key for record in disk.records()]
