"""What a disk tier takes of the device, and what happens when several threads want some of it at the same moment."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from kvredis.storage.disk import DiskOptions, DiskTier
from kvredis.storage.segment import HEADER_BYTES

from .small_disk import KIB, SEGMENT_BYTES, content, got, keys, put, small_disk

MIB = 1024 * KIB


def test_threads_that_find_no_room_at_the_same_moment_share_the_segment_that_one_of_them_begins(
    tmp_path: Path,
) -> None:
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
