"""Dropping a database, or all, from the disk tier; and what is pending for the index meanwhile."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.disk.segment import HEADER_BYTES, Record, scratch
from kvredis.storage.disk.tier import DiskTier
from kvredis.storage.memory.allocator import Extent
from tests.storage.fake_files import FakeFiles, Fault

from .small_disk import KIB, SEGMENT_BYTES, content, got, index_agrees, keys, put, small_disk, written

FILLS_A_SEGMENT = SEGMENT_BYTES - HEADER_BYTES


@pytest.mark.parametrize("settled", [True, False])
def test_one_database_is_cleared_and_the_others_stay(tmp_path: Path, settled: bool) -> None:
    with closing(small_disk(tmp_path)) as disk:
        for number in range(3):
            assert put(disk, b"%d" % number, b"goes", 1)
        assert put(disk, b"0", b"stays", 2)
        if settled:
            assert disk.settle()
        assert disk.clear(1) == 3
        assert disk.clear(1) == 0
        assert got(disk, b"0", 1) is None
        index_agrees(disk)
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"0"]
        assert got(disk, b"0", 2) == b"stays"
        assert disk.clear(2) == 1
        index_agrees(disk)


def test_all_is_cleared_and_its_room_comes_back_once_the_index_knows(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        for space in range(16):
            assert put(disk, b"key", b"payload", space)
        records = list(disk.records())
        assert disk.clear() == 16
        assert (len(disk), disk.live_bytes, keys(disk)) == (0, 0, [])
        assert not any(disk.read(record, scratch(7)) for record in records)
        disk.check_integrity()
        assert disk.free_bytes < disk.limit_bytes
        index_agrees(disk)
        assert disk.free_bytes == disk.limit_bytes
        assert disk.clear() == 0
        assert not disk.unsettled
    with closing(small_disk(tmp_path)) as disk:
        assert len(disk) == 0


def test_what_is_put_after_a_clear_is_there_though_both_reach_the_index_together(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"a", b"before")
        assert disk.settle()
        assert put(disk, b"b", b"before")
        assert disk.rename((b"a", 0), (b"c", 1))
        assert disk.clear() == 2
        assert put(disk, b"a", b"after")
        assert disk.set_expiry(b"a", 0, 9000)
        index_agrees(disk)
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"a"]
        assert got(disk, b"a") == b"after"


def test_clears_and_exchanges_of_databases_reach_the_index_in_their_order(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        for space in (0, 1, 2):
            assert put(disk, b"key", b"of %d" % space, space)
        assert disk.settle()
        disk.swap(0, 1)
        assert disk.clear(0) == 1
        disk.swap(0, 2)
        assert put(disk, b"key", b"new", 2)
        disk.swap(1, 2)
        expected = [b"of 2", b"new", b"of 0"]
        assert [got(disk, b"key", space) for space in (0, 1, 2)] == expected
        index_agrees(disk)
    with closing(small_disk(tmp_path)) as disk:
        assert [got(disk, b"key", space) for space in (0, 1, 2)] == expected


def test_a_cleared_block_may_still_be_read_to_its_end(tmp_path: Path) -> None:
    class SlowFiles(FakeFiles):
        """Clears the disk and asks for the room in the middle of a read."""

        def happen(self, what: str) -> Fault | None:
            if what.startswith("pread") and disk.clear():
                assert disk.settle()
                disk.check_integrity()
                assert disk.place(FILLS_A_SEGMENT) == (None, [])
            return super().happen(what)

    disk = small_disk(tmp_path, SlowFiles(), segments=1)
    with closing(disk):
        assert put(disk, b"key", content(1, FILLS_A_SEGMENT))
        assert got(disk, b"key") == content(1, FILLS_A_SEGMENT)
        assert disk.free_bytes == disk.limit_bytes
        disk.check_integrity()


def test_an_index_that_fails_learns_of_everything_the_next_time(tmp_path: Path) -> None:
    class Failing(FakeFiles):
        """Has the event loop change all sorts of things while the index is being written, and then fails."""

        def happen(self, what: str) -> Fault | None:
            if what == "index: commit" and armed:
                armed.clear()
                assert disk.rename((b"moved", 0), (b"kept", 0))
                assert disk.clear(1) == 1
                disk.swap(0, 1)
                assert disk.forget(b"forgotten", 1)
                raise sqlite3.OperationalError("the fake fails")
            return super().happen(what)

    armed: list[bool] = []
    disk = small_disk(tmp_path, Failing())
    with closing(disk):
        assert put(disk, b"moved", b"payload")
        assert put(disk, b"gone", b"gone", 1)
        assert disk.settle()
        assert put(disk, b"kept", b"replaced")
        assert put(disk, b"forgotten", b"forgotten")
        assert disk.set_expiry(b"gone", 1, 9000)
        armed.append(True)
        assert not disk.settle()
        assert disk.unsettled
        disk.check_integrity()
        index_agrees(disk)
        assert got(disk, b"kept", 1) == b"payload"
        assert len(disk) == 1


def test_only_a_settle_that_has_something_to_do_is_asked_for(disk: DiskTier) -> None:
    assert not disk.unsettled
    record = written(disk, b"key", b"payload")
    assert record is not None
    assert not disk.unsettled
    assert disk.publish(record)
    assert disk.unsettled
    assert disk.sync()
    assert not disk.unsettled
    disk.touch(record)
    assert got(disk, b"key") == b"payload"
    assert not disk.unsettled
    assert disk.forget(b"key", 0)
    assert disk.unsettled
    assert disk.settle()
    assert not disk.unsettled
    assert put(disk, b"key", b"payload")
    assert disk.settle()
    for step in (lambda: disk.swap(0, 1), disk.clear):
        step()
        assert disk.unsettled
        assert disk.settle()
        assert not disk.unsettled


def test_extents_become_free_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CountingLock:
        """Counts how many extents become free under one hold of the tier's lock."""

        def __enter__(self) -> None:
            lock.acquire()
            self.before = len(disk._freeing)

        def __exit__(self, *_: object) -> None:
            freed.append(self.before - len(disk._freeing))
            lock.release()

    monkeypatch.setattr("kvredis.storage.disk.tier.FREED_AT_ONCE", 4)
    freed: list[int] = []
    with closing(small_disk(tmp_path)) as disk:
        for number in range(11):
            assert put(disk, b"%d" % number, b"x")
        assert disk.clear() == 11
        lock = disk._lock
        monkeypatch.setattr(disk, "_lock", CountingLock())
        assert disk.settle()
        monkeypatch.undo()
        assert [count for count in freed if count > 0] == [4, 4, 3]
        assert disk.free_bytes == disk.limit_bytes
        disk.check_integrity()


def test_no_record_leaves_for_a_writer_while_enough_is_becoming_free(tmp_path: Path) -> None:
    class Announcing:
        """The settling lock, which tells when a thread is about to wait for it."""

        def __enter__(self) -> None:
            if threading.current_thread() is other:
                reached.set()
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()

    class Busy(FakeFiles):
        """Has another thread want room while the index is being written."""

        def happen(self, what: str) -> Fault | None:
            if what == "index: commit" and armed:
                other.start()
                assert reached.wait(60)
            return super().happen(what)

    armed: list[bool] = []
    placed: list[tuple[Extent | None, list[Record]]] = []
    reached = threading.Event()
    disk = small_disk(tmp_path, Busy(), segments=1)
    other = threading.Thread(target=lambda: placed.append(disk.place(30 * KIB)))
    lock, disk._settling = disk._settling, Announcing()  # type: ignore[assignment]
    with closing(disk):
        assert put(disk, b"stays", bytes(30 * KIB))
        assert put(disk, b"goes", bytes(30 * KIB))
        assert disk.settle()
        assert disk.forget(b"goes", 0)
        armed.append(True)
        assert disk.settle()
        armed.clear()
        other.join()
        [(extent, left)] = placed
        assert extent is not None
        assert left == []
        assert keys(disk) == [b"stays"]


def test_an_index_that_has_no_memory_confirms_nothing_and_learns_of_it_the_next_time(tmp_path: Path) -> None:
    class Files(FakeFiles):
        def step(self, what: str) -> None:
            super().step(what)
            if starved and what == "index: commit":
                raise MemoryError  # as sqlite3 says it

    starved = False
    files = Files()
    with closing(small_disk(tmp_path / "disk", files)) as disk:
        assert put(disk, b"old", b"1")
        assert disk.sync()
        assert put(disk, b"new", b"2")
        assert disk.forget(b"old", 0)
        starved = True
        assert not disk.settle()
        assert not disk.sync()
        starved = False
        assert disk.sync()
        disk.check_integrity()
        files.leave_behind(tmp_path / "after")
    with closing(small_disk(tmp_path / "after")) as disk:
        assert keys(disk) == [b"new"]
