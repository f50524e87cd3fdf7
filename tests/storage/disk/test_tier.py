"""The disk tier at work: what goes to disk comes back, who leaves for it, and what a bad device can and cannot do."""

import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvredis.storage.disk.files import RealFiles
from kvredis.storage.disk.segment import HEADER_BYTES, KEY_BYTES_MAX, Facts, record_bytes, scratch
from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.allocator import GRAIN_BYTES
from kvredis.storage.memory.arena import Arena, HugepageMode
from tests.storage.fake_files import FakeFiles, Fault, on

from .small_disk import (
    KIB,
    SEGMENT_BYTES,
    SEGMENTS,
    content,
    got,
    image_of,
    index_agrees,
    keys,
    options,
    put,
    small_disk,
    taken,
    written,
)

FILLS_A_SEGMENT = SEGMENT_BYTES - HEADER_BYTES
ONE_GRAIN = GRAIN_BYTES - HEADER_BYTES


@pytest.mark.parametrize("length", [0, 1, ONE_GRAIN, ONE_GRAIN + 1, FILLS_A_SEGMENT])
def test_what_was_put_is_got(length: int, disk: DiskTier) -> None:
    assert put(disk, b"key", content(length, length))
    assert got(disk, b"key") == content(length, length)
    disk.check_integrity()


def test_no_reader_sees_a_block_before_it_is_published(disk: DiskTier) -> None:
    record = written(disk, b"key", b"payload")
    assert got(disk, b"key") is None
    assert record is not None
    assert disk.publish(record)
    assert got(disk, b"key") == b"payload"


def test_a_key_is_another_one_in_another_database(disk: DiskTier) -> None:
    assert put(disk, b"key", b"three", space=3)
    assert got(disk, b"key") is None
    assert got(disk, b"key", space=3) == b"three"


def test_blocks_go_from_an_arena_to_disk_and_back_with_o_direct_where_the_file_system_has_it(tmp_path: Path) -> None:
    if (obstacle := RealFiles().direct_obstacle(tmp_path)) is not None:
        pytest.skip(obstacle)
    with Arena.create(8 * KIB * KIB, HugepageMode.OFF) as arena:
        disk = DiskTier.open(DiskOptions(tmp_path, 4 * KIB * KIB))
        assert disk.direct
        assert disk.fallback is None
        extent, _ = disk.place(KIB * KIB)
        assert extent is not None
        payload = content(1, KIB * KIB)
        with arena.view[GRAIN_BYTES:] as image, arena.view[4 * KIB * KIB :] as into:
            image[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
            record = disk.write(extent, image, Facts(b"key", 0, len(payload), 0))
            assert record is not None
            disk.publish(record)
            assert disk.read(record, into)
            assert into[HEADER_BYTES : HEADER_BYTES + len(payload)] == payload
        disk.close()


def test_a_file_system_without_o_direct_is_used_buffered_and_named(tmp_path: Path) -> None:
    with closing(DiskTier.open(options(tmp_path, direct=True), FakeFiles(direct=False))) as disk:
        assert not disk.direct
        assert disk.fallback == "the fake refuses O_DIRECT"
        assert put(disk, b"key", b"payload")


# ---- room --------------------------------------------------------------------------------------------------------


def test_free_room_is_taken_where_it_is_and_place_begins_segments_up_to_the_limit(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert not taken(disk, 100), "no segment yet"
        for count in range(1, SEGMENTS + 1):
            assert put(disk, b"%d" % count, bytes(FILLS_A_SEGMENT))
            assert disk.file_bytes == count * SEGMENT_BYTES
        assert not taken(disk, 100)
        assert put(disk, b"more", b"")
        assert disk.file_bytes == disk.limit_bytes == SEGMENTS * SEGMENT_BYTES
        files = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("segment-*"))
        assert files <= disk.limit_bytes


def test_the_coldest_leave_for_new_ones_and_are_named(disk: DiskTier) -> None:
    for name in (b"a", b"b", b"c"):
        assert put(disk, name, bytes(FILLS_A_SEGMENT))
    coldest = disk.get(b"a", 0)
    assert coldest is not None
    disk.touch(coldest)
    extent, left = disk.place(FILLS_A_SEGMENT)
    assert extent is not None
    assert [record.key for record in left] == [b"b"]
    assert keys(disk) == [b"c", b"a"]
    disk.check_integrity()
    disk.abandon(extent)
    disk.check_integrity()


def test_no_record_lies_across_two_segments(disk: DiskTier) -> None:
    for number in range(40):
        assert put(disk, b"%d" % number, content(number, 11 * KIB))
        disk.check_integrity()
    for record in disk.records():
        _, offset = disk.geometry.locate(record.extent)
        assert offset + record.extent.length <= SEGMENT_BYTES
        assert got(disk, record.key) == content(int(record.key), 11 * KIB)


def test_what_can_never_be_stored_is_said_and_costs_nothing(disk: DiskTier) -> None:
    assert put(disk, b"x" * KEY_BYTES_MAX, b"payload")
    assert not disk.storable(b"x" * (KEY_BYTES_MAX + 1), 1)
    assert not put(disk, b"x" * (KEY_BYTES_MAX + 1), b"payload")
    assert not disk.storable(b"key", FILLS_A_SEGMENT + 1)
    assert disk.place(FILLS_A_SEGMENT + 1) == (None, [])
    assert len(disk) == 1
    disk.check_integrity()


def test_no_record_leaves_while_being_read_so_a_disk_full_of_readers_has_no_room(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path, segments=1)) as disk:
        assert put(disk, b"key", bytes(FILLS_A_SEGMENT))
        record = disk.get(b"key", 0)
        assert record is not None
        record.readers += 1
        assert disk.place(100) == (None, [])
        assert disk.stats.no_room == 1
        record.readers -= 1
        assert disk.place(100)[0] is not None


def test_a_full_device_means_fewer_segments_and_is_asked_again_only_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvredis.storage.disk.tier.GROW_PAUSE_TRIES", 2)
    files = FakeFiles(on("allocate segment-0001", Fault.ENOSPC))
    with closing(small_disk(tmp_path, files)) as disk:
        for name in (b"a", b"b", b"c"):
            assert put(disk, name, bytes(FILLS_A_SEGMENT))
            assert keys(disk) == [name]
        assert disk.file_bytes == SEGMENT_BYTES
        assert not (tmp_path / "segment-0001.kv").exists()
        files.plan = None
        assert put(disk, b"d", bytes(FILLS_A_SEGMENT))
        assert keys(disk) == [b"d"]
        assert files.words.count("allocate segment-0001.kv") == 1
        assert put(disk, b"e", bytes(FILLS_A_SEGMENT))
        assert keys(disk) == [b"d", b"e"], "asked again, the device had room"
        disk.check_integrity()


def test_there_are_never_more_records_than_may_be_though_there_is_room(tmp_path: Path) -> None:
    def limited(records_max: int) -> DiskTier:
        return DiskTier.open(replace(options(tmp_path), records_max=records_max), now_ms=0)

    with closing(limited(3)) as disk:
        for number in range(5):
            assert put(disk, b"%d" % number, b"x")
            disk.check_integrity()
        assert keys(disk) == [b"2", b"3", b"4"]
        assert disk.stats.evicted == 2
        assert not taken(disk, 1), "who may not evict has no room"
        assert disk.place(1, evict=False) == (None, [])
        extent, left = disk.place(1)
        assert extent is not None
        assert [record.key for record in left] == [b"2"]
        for record in disk.records():
            record.readers += 1
        assert disk.place(1) == (None, []), "what is being written counts, and who is read cannot leave"
        for record in disk.records():
            record.readers -= 1
        disk.abandon(extent)
    with closing(limited(1)) as disk:
        assert keys(disk) == [b"4"], "a smaller bound costs the coldest"
        index_agrees(disk)


def test_what_it_tells_operators_adds_up(disk: DiskTier) -> None:
    for number in range(4):
        assert put(disk, b"%d" % number, bytes(9000))
    assert disk.forget(b"0", 0)
    assert disk.settle()
    figures = disk.figures()
    assert figures["capacity"] == SEGMENTS * SEGMENT_BYTES
    assert (figures["files"], figures["segments"], figures["segment_size"]) == (SEGMENT_BYTES, 1, SEGMENT_BYTES)
    assert (figures["used"], figures["entries"]) == (3 * 12 * KIB, 3)
    assert figures["free"] == SEGMENTS * SEGMENT_BYTES - 3 * 12 * KIB
    assert figures["direct"] == "O_DIRECT was not asked for"
    assert (figures["written"], figures["quarantined"]) == (4, 0)
    assert disk.stats.as_dict().items() <= figures.items()


# ---- overwriting and forgetting --------------------------------------------------------------------------------------


def test_the_newer_record_of_a_key_wins_in_whichever_order_they_are_published(disk: DiskTier) -> None:
    older, newer = written(disk, b"key", b"older"), written(disk, b"key", b"newer")
    assert older is not None
    assert newer is not None
    assert disk.publish(newer)
    assert not disk.publish(older)
    assert got(disk, b"key") == b"newer"
    assert put(disk, b"key", b"newest")
    assert got(disk, b"key") == b"newest"
    assert not disk.read(newer, scratch(5)), "a record that was replaced is gone"
    assert len(disk) == 1
    disk.check_integrity()


def test_what_is_forgotten_is_gone_and_its_room_comes_back_once_the_index_knows(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path, segments=1)) as disk:
        assert put(disk, b"key", bytes(FILLS_A_SEGMENT))
        assert disk.forget(b"key", 0)
        assert not disk.forget(b"key", 0)
        assert got(disk, b"key") is None
        assert not taken(disk, 0)
        disk.check_integrity()
        assert disk.settle()
        assert taken(disk, 0)
        disk.check_integrity()


def test_an_extent_is_not_used_again_under_a_reader(tmp_path: Path) -> None:
    class SlowFiles(FakeFiles):
        """Forgets the record and fills the disk in the middle of a read."""

        def happen(self, what: str) -> Fault | None:
            if what.startswith("pread") and disk.forget(b"key", 0):
                assert disk.settle()
                disk.check_integrity()
                assert disk.place(FILLS_A_SEGMENT) == (None, [])
            return super().happen(what)

    disk = small_disk(tmp_path, files := SlowFiles(), segments=1)
    with closing(disk):
        assert put(disk, b"key", content(1, FILLS_A_SEGMENT))
        assert got(disk, b"key") == content(1, FILLS_A_SEGMENT)
        assert files.dead is False
        assert taken(disk, FILLS_A_SEGMENT)
        disk.check_integrity()


# ---- bad devices -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.HALF])
def test_a_record_that_came_out_wrong_is_quarantined_and_its_room_is_not_used_again(
    tmp_path: Path, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    files = FakeFiles(on("pwrite", fault))
    with closing(small_disk(tmp_path, files, segments=1)) as disk:
        put(disk, b"key", content(1, 50 * KIB))
        assert got(disk, b"key") is None
        assert got(disk, b"key") is None
        assert disk.get(b"key", 0) is None
        assert disk.stats.quarantined == 1
        assert "quarantined, a miss: segment-0000.kv at 0: payload checksum" in caplog.text
        disk.check_integrity()
        assert disk.place(50 * KIB) == (None, [])
        files.plan = None
        assert put(disk, b"key", b"in what is left")
        assert got(disk, b"key") == b"in what is left"
    with closing(small_disk(tmp_path, segments=1)) as disk:
        assert got(disk, b"key") == b"in what is left"
        assert disk.stats.dropped == 0
        disk.check_integrity()


def test_a_record_that_cannot_be_read_is_a_miss(tmp_path: Path) -> None:
    files = FakeFiles(on("pread", Fault.EIO))
    with closing(small_disk(tmp_path, files)) as disk:
        assert put(disk, b"key", b"payload")
        assert got(disk, b"key") is None
        assert (disk.stats.read_errors, disk.stats.quarantined) == (1, 1)
        disk.check_integrity()


@pytest.mark.parametrize("fault", [Fault.EIO, Fault.ENOSPC])
def test_a_device_that_refused_a_write_is_used_again_when_it_is_well(tmp_path: Path, fault: Fault) -> None:
    files = FakeFiles(on("pwrite", fault))
    with closing(small_disk(tmp_path, files, segments=1)) as disk:
        assert not put(disk, b"key", bytes(FILLS_A_SEGMENT))
        assert disk.stats.write_errors == 1
        disk.check_integrity()
        files.plan = None
        assert put(disk, b"key", bytes(FILLS_A_SEGMENT))


def test_a_spot_that_cannot_be_written_while_others_can_is_not_tried_again(tmp_path: Path) -> None:
    files = FakeFiles(on("pwrite segment-0000", Fault.EIO))
    with closing(small_disk(tmp_path, files, segments=2)) as disk:
        assert not put(disk, b"key", bytes(FILLS_A_SEGMENT))
        assert put(disk, b"key", bytes(FILLS_A_SEGMENT))
        files.plan = None
        assert disk.place(FILLS_A_SEGMENT, evict=False) == (None, [])
        disk.check_integrity()


def test_after_a_refused_sync_nothing_is_confirmed_any_more(tmp_path: Path) -> None:
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        assert put(disk, b"key", b"payload")
        assert disk.sync()
        steps = len(files.words)
        assert disk.sync()
        assert len(files.words) == steps, "with nothing to do nothing is waited for"
        assert put(disk, b"key", b"payload")
        files.plan = on("sync segment", Fault.EIO)
        assert not disk.sync()
        files.plan = None
        assert not disk.sync()
        assert disk.stats.sync_errors == 1
        assert got(disk, b"key") == b"payload"


def test_a_settle_waits_for_the_device_only_where_a_confirmed_record_was_replaced(tmp_path: Path) -> None:
    class Watching(FakeFiles):
        """Asks SQLite how it is going to commit: 1 is NORMAL, which waits for nothing, 2 is FULL, which does."""

        def happen(self, what: str) -> Fault | None:
            if what == "index: commit" and started:
                seen.append(disk._index._do("PRAGMA synchronous").fetchone()[0])
            return super().happen(what)

    seen: list[int] = []
    started = False
    with closing(small_disk(tmp_path, Watching())) as disk:
        started = True
        assert put(disk, b"key", b"payload")
        assert disk.settle()
        assert put(disk, b"key", b"not confirmed before")
        assert disk.settle()
        assert disk.sync()
        assert put(disk, b"other", b"payload")
        assert disk.settle()
        assert put(disk, b"key", b"payload")
        assert disk.replaces
        assert disk.settle()
        assert seen == [1, 1, 2, 1, 2]


def test_an_index_that_cannot_be_written_confirms_nothing_and_frees_nothing(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path, segments=1)) as disk:
        assert put(disk, b"key", bytes(FILLS_A_SEGMENT))
        assert disk.sync()
        disk._index._do("PRAGMA query_only=1")
        extent, left = disk.place(100)
        assert extent is None
        assert [record.key for record in left] == [b"key"]
        assert not disk.sync()
        assert disk.stats.index_errors == 2
        disk.check_integrity()
        disk._index._do("PRAGMA query_only=0")
        assert disk.sync()
        assert disk.place(100)[0] is not None
        disk.check_integrity()


def test_many_changes_are_settled_by_the_thread_that_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvredis.storage.disk.tier.CHANGES_HIGH", 4)
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        begun = files.words.count("index: commit")
        for number in range(9):
            assert put(disk, b"%d" % number, b"x")
        assert files.words.count("index: commit") == begun + 2


def test_a_second_tier_on_a_directory_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)), pytest.raises(ConfigError, match="another server has it open"):
        small_disk(tmp_path)
    small_disk(tmp_path).close()


# Short blocks are written side by side in one piece, and are blocks like any other afterwards.

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


def test_of_blocks_written_together_some_may_be_abandoned_and_others_leave_by_themselves(disk: DiskTier) -> None:
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


# Long blocks are written side by side too, out of the memory where they lie.

RUN = [(Facts(b"long:%d" % n, 0, 9000 + n, 0), content(n, 9000 + n)) for n in range(4)]
RUN_RECORD_BYTES = record_bytes(9000)


def run_images() -> list[tuple[Facts, memoryview]]:
    return [(facts, image_of(value)) for facts, value in RUN]


def test_a_run_of_blocks_costs_one_write_and_is_read_block_by_block(tmp_path: Path) -> None:
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        put(disk, b"first", b"so that there is a segment")
        before = sum(word.startswith("pwrite segment") for word in files.words)
        records, left = disk.write_run(run_images())
        assert sum(word.startswith("pwrite segment") for word in files.words) == before + 1
        assert records is not None
        assert not left
        disk.abandon(records[2].extent)
        assert all(disk.publish(record) for record in records if record is not records[2])
        disk.check_integrity()
        assert [got(disk, facts.key) for facts, _ in RUN] == [RUN[0][1], RUN[1][1], None, RUN[3][1]]
    with closing(small_disk(tmp_path)) as again:
        assert [got(again, facts.key) for facts, _ in RUN] == [RUN[0][1], RUN[1][1], None, RUN[3][1]]


def test_a_run_that_the_device_refuses_leaves_nothing_taken(tmp_path: Path) -> None:
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        put(disk, b"first", b"so that there is a segment")
        files.plan = on("pwrite", Fault.EIO)
        assert disk.write_run(run_images()) == (None, [])
        files.plan = None
        disk.check_integrity()
        assert disk.stats.write_errors == 1
        assert all(put(disk, facts.key, value) for facts, value in RUN), "one by one they find room"


def test_a_run_that_is_torn_brings_back_only_what_is_whole(tmp_path: Path) -> None:
    files = FakeFiles()
    with closing(small_disk(tmp_path, files)) as disk:
        put(disk, b"first", b"so that there is a segment")
        files.plan = on("pwrite", Fault.HALF)
        records, _ = disk.write_run(run_images())
        files.plan = None
        assert records is not None
        assert all(disk.publish(record) for record in records)
        assert [got(disk, facts.key) for facts, _ in RUN] == [RUN[0][1], RUN[1][1], None, None]


def test_of_the_coldest_only_those_that_lie_side_by_side_leave_for_a_run(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path, segments=1)) as disk:
        held = SEGMENT_BYTES // RUN_RECORD_BYTES
        for number in range(held):
            assert put(disk, b"old:%d" % number, content(number, 9000))
        records, left = disk.write_run(run_images())
        assert records is not None
        assert [record.key for record in left] == [b"old:%d" % number for number in range(len(RUN))]
        disk.check_integrity()


def test_no_block_leaves_for_a_run_where_none_may_or_where_the_coldest_lie_apart(tmp_path: Path) -> None:
    segments = 8
    with closing(small_disk(tmp_path, segments=segments)) as disk:
        keys = [b"old:%d" % number for number in range(segments * (SEGMENT_BYTES // RUN_RECORD_BYTES))]
        for number, key in enumerate(keys):
            assert put(disk, key, content(number, 9000))
        assert disk.write_run(run_images(), evict=False) == (None, [])
        for key in keys[1::2]:  # from now on each second one is among the hottest
            record = disk.get(key, 0)
            assert record is not None
            disk.touch(record)
        hottest = keys[1::2]
        records, left = disk.write_run(run_images()[:2])
        assert records is None
        assert not left
        assert all(got(disk, key) is not None for key in hottest)
        disk.check_integrity()


def test_a_run_longer_than_a_segment_is_none(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        blocks = [(Facts(b"long:%d" % n, 0, 30_000, 0), image_of(content(n, 30_000))) for n in range(3)]
        assert disk.write_run(blocks) == (None, [])
        disk.check_integrity()


# A process with a disk tier that forks another: what it writes afterwards is as safe as if it had not.

ROOT = Path(__file__).parents[3]


EXIT_S = 60


PARENT = """
import os, sys
from pathlib import Path
from tests.storage.disk.small_disk import content, put, small_disk

disk = small_disk(Path(sys.argv[1]))
assert put(disk, b"before", content(1, 5000)) and disk.sync()
child = os.fork()
if not child:
    {child}
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert put(disk, b"after", content(2, 5000)) and disk.sync()
os._exit(0)  # as if killed
"""


@pytest.mark.parametrize("child", ["pass", "del disk"])
def test_what_is_synced_after_a_forked_process_has_ended_outlives_a_kill(child: str, tmp_path: Path) -> None:
    parent = [sys.executable, "-c", PARENT.format(child=child), str(tmp_path)]
    told = subprocess.run(parent, cwd=ROOT, capture_output=True, text=True, timeout=EXIT_S)
    assert (told.returncode, told.stderr) == (0, "")
    with closing(small_disk(tmp_path)) as disk:
        assert [got(disk, b"before"), got(disk, b"after")] == [content(1, 5000), content(2, 5000)]
