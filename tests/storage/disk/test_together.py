"""Short blocks are written side by side in one piece, and are blocks like any other afterwards."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvredis.storage.disk.segment import Facts, record_bytes
from kvredis.storage.disk.tier import DiskTier
from tests.storage.fake_files import FakeFiles, Fault, on

from .small_disk import SEGMENT_BYTES, content, got, options, put, small_disk

LENGTHS = (0, 1, 3584, 3585, 9000)
BLOCKS = [(Facts(b"short:%d" % n, 0, n, 0), content(n, n)) for n in LENGTHS]


def test_blocks_written_together_cost_one_write_and_are_read_one_by_one(tmp_path: Path) -> None:
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        put(disk, b"first", b"so that there is a segment")
        before = sum(word.startswith("pwrite segment") for word in files.words)
        records, left = disk.write_together(BLOCKS)
        assert sum(word.startswith("pwrite segment") for word in files.words) == before + 1
        assert records is not None
        assert not left
        assert all(disk.publish(record) for record in records)
        disk.check_integrity()
        assert [got(disk, facts.key) for facts, _ in BLOCKS] == [value for _, value in BLOCKS]


def test_of_blocks_written_together_some_may_be_abandoned_and_others_leave_by_themselves(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        records, _ = disk.write_together(BLOCKS)
        assert records is not None
        for record in records[::2]:
            disk.abandon(record.extent)
        for record in records[1::2]:
            disk.publish(record)
        disk.check_integrity()
        assert disk.forget(b"short:1", 0)
        assert disk.settle()
        disk.check_integrity()
        assert got(disk, b"short:3585") == content(3585, 3585)
        assert disk.live_bytes == record_bytes(3585)


def test_a_device_that_refuses_the_piece_keeps_nothing_of_it_and_the_next_piece_finds_room(tmp_path: Path) -> None:
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        put(disk, b"first", b"so that there is a segment")
        files.plan = on("pwrite", Fault.EIO)
        assert disk.write_together(BLOCKS) == (None, [])
        files.plan = None
        disk.check_integrity()
        records, _ = disk.write_together(BLOCKS)
        assert records is not None
        assert disk.stats.write_errors == 1


def test_the_coldest_leave_for_blocks_that_are_written_together(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path, segments=1)) as disk:
        for number in range(SEGMENT_BYTES // record_bytes(9000)):
            assert put(disk, b"old:%d" % number, content(number, 9000))
        records, left = disk.write_together(BLOCKS)
        assert records is not None
        assert [record.key for record in left] == [b"old:0", b"old:1", b"old:2"]


def test_blocks_written_together_are_as_many_records_as_they_are(tmp_path: Path) -> None:
    with closing(DiskTier.open(replace(options(tmp_path), records_max=8), now_ms=0)) as disk:
        for number in range(6):
            assert put(disk, b"old:%d" % number, b"x")
        assert disk.write_together(BLOCKS, evict=False) == (None, [])
        first, left = disk.write_together(BLOCKS)
        assert first is not None
        assert [record.key for record in left] == [b"old:0", b"old:1", b"old:2"]
        disk.check_integrity()
        assert disk.write_together(BLOCKS) == (None, []), "those that are being written count, one by one"
        assert all(disk.publish(record) for record in first)
        disk.check_integrity()
        again, left = disk.write_together([(facts._replace(space=1), value) for facts, value in BLOCKS])
        assert again is not None
        assert [record.key for record in left] == [b"old:3", b"old:4", b"old:5", b"short:0", b"short:1"]
        for record in again:
            disk.abandon(record.extent)
        disk.check_integrity()
        assert all(put(disk, b"one:%d" % number, b"x") for number in range(5)), "those that were given up do not"
        assert disk.stats.evicted == 8


def test_what_was_written_together_is_there_after_a_restart(tmp_path: Path) -> None:
    disk = small_disk(tmp_path)
    records, _ = disk.write_together(BLOCKS)
    assert records is not None
    for record in records:
        disk.publish(record)
    disk.close()
    with closing(small_disk(tmp_path)) as again:
        assert [got(again, facts.key) for facts, _ in BLOCKS] == [value for _, value in BLOCKS]
