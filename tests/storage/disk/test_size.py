"""What a disk tier takes of the device, and what happens when several threads want some of it at the same moment."""

import errno
import random
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.disk.recovery import LIMIT_BYTES_MAX
from kvredis.storage.disk.segment import HEADER_BYTES, Record
from kvredis.storage.disk.state import LOOK_RECORDS_MAX
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.memory.allocator import GRAIN_BYTES, Allocator, Extent, windows

from .small_disk import KIB, SEGMENT_BYTES, content, got, keys, put, small_disk

MIB = 1024 * KIB
TWO_GRAINS = 2 * GRAIN_BYTES - HEADER_BYTES
"""A block that lies in as much room as two of the shortest."""


def test_threads_that_find_no_room_at_the_same_moment_share_the_segment_that_one_of_them_begins(tmp_path: Path) -> None:
    threads = 4
    disk = small_disk(tmp_path, segments=1)
    at_once = threading.Barrier(threads)

    def place(_: int) -> bool:
        at_once.wait()
        return disk.place(KIB)[0] is not None

    with closing(disk), ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(place, range(threads)))
        assert disk.stats.no_room == 0
        assert disk.file_bytes == SEGMENT_BYTES


def test_a_disk_that_is_written_three_times_over_never_takes_more_than_its_limit_and_one_chunk(tmp_path: Path) -> None:
    limit_bytes, chunk_bytes = 96 * MIB, 9 * MIB  # 256 tokens of a model with 36,864 bytes each
    disk = DiskTier.open(DiskOptions(tmp_path, limit_bytes, direct=False, segment_bytes=32 * MIB))
    payload = random.Random(1).randbytes(chunk_bytes)
    with closing(disk):
        for number in range(3 * limit_bytes // chunk_bytes):
            assert put(disk, b"chunk:%d" % number, payload)
            assert taken_bytes(tmp_path) <= limit_bytes + chunk_bytes
        assert disk.stats.evicted > 0
    assert taken_bytes(tmp_path) > limit_bytes // 2


@pytest.mark.parametrize("limit_bytes", [LIMIT_BYTES_MAX + 1, 300 << 40, 100_000 << 40])
def test_a_disk_that_is_larger_than_a_tier_can_be_is_used_as_far_as_it_can(
    tmp_path: Path, limit_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):  # a new directory, and one that is there
        with closing(DiskTier.open(DiskOptions(tmp_path, limit_bytes, direct=False))) as disk:
            assert 0.99 * LIMIT_BYTES_MAX < disk.limit_bytes <= LIMIT_BYTES_MAX
    assert f"no more of the {limit_bytes} bytes given" in caplog.text


def test_a_disk_of_60_tib_is_used_whole_and_keeps_what_it_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "sparse files have to do")

    monkeypatch.setattr("kvredis.storage.disk.files.os.posix_fallocate", refuse)
    options, payload = DiskOptions(tmp_path, 60 << 40, direct=False), content(1, 64 * KIB)
    with closing(DiskTier.open(options)) as disk:
        assert disk.limit_bytes == 60 << 40
        assert put(disk, b"block", payload)
    with closing(DiskTier.open(options)) as disk:
        assert got(disk, b"block") == payload
        disk.check_integrity()
    assert not [record for record in caplog.records if record.levelname != "INFO"]


@pytest.fixture
def full_of_short_ones(tmp_path: Path) -> Iterator[DiskTier]:
    """2048 records of a grain each, of which every second one is cold: no two of those lie side by side."""
    with closing(DiskTier.open(DiskOptions(tmp_path, 8 * MIB, direct=False))) as disk:
        for number in range(8 * MIB // GRAIN_BYTES):
            assert put(disk, b"%d" % number, b"x")
        for record in list(disk.records())[1::2]:
            disk.touch(record)
        yield disk


def test_under_the_lock_room_is_looked_for_among_the_coldest_only(
    full_of_short_ones: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, looks = full_of_short_ones, [0]
    window = Allocator.window

    def counted(self: Allocator, length: int, victims: Iterable[Record]) -> tuple[Extent, list[Record]] | None:
        looks.append(0)

        def counting() -> Iterator[Record]:
            for record in victims:
                looks[-1] += 1
                yield record

        return window(self, length, counting())

    monkeypatch.setattr(Allocator, "window", counted)
    extent, left = disk.place(TWO_GRAINS)
    assert extent is not None
    assert [record.key for record in left] == [b"%d" % number for number in range(32)], "for 16 such blocks"
    assert max(looks) == LOOK_RECORDS_MAX, "the event loop waits for that lock"
    disk.check_integrity()


def test_what_is_read_or_leaves_while_room_is_looked_for_far_off_makes_none(
    full_of_short_ones: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = full_of_short_ones
    found: list[Record] = []

    def interrupted(length: int, victims: Iterable[Record], holes: Iterable[tuple[int, int]]) -> Iterator[list[Record]]:
        for run in windows(length, victims, holes):
            found.extend(run)
            if len(found) == 2:
                assert disk.forget(run[0].key, 0)
                run[1].readers += 1
            yield run

    monkeypatch.setattr("kvredis.storage.disk.tier.windows", interrupted)
    extent, left = disk.place(TWO_GRAINS)
    assert extent is not None
    assert left == found[2:]
    found[1].readers -= 1
    disk.check_integrity()
    disk.abandon(extent)
    for record in disk.records():
        record.readers += 1
    assert disk.place(8 * MIB - HEADER_BYTES) == (None, []), "no record may leave"


def test_a_tier_whose_directory_was_moved_begins_no_segment_in_that_of_another(tmp_path: Path) -> None:
    payload = content(1, SEGMENT_BYTES - HEADER_BYTES)
    with closing(small_disk(tmp_path / "disk")) as moved:
        assert put(moved, b"before", payload)
        (tmp_path / "disk").rename(tmp_path / "elsewhere")
        with closing(small_disk(tmp_path / "disk")) as other:
            assert put(other, b"first", payload)
            assert put(moved, b"after", payload), "in the room of what it has"
            assert keys(moved) == [b"after"]
            assert put(other, b"second", payload)
            assert (got(other, b"first"), got(other, b"second")) == (payload, payload)
            moved.check_integrity()
    with closing(small_disk(tmp_path / "elsewhere")) as back:
        assert got(back, b"after") == payload


def taken_bytes(directory: Path) -> int:
    """What du says."""
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())
