"""Blocks on disk that change their names: one by one, and with their whole database."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvredis.storage.database import unplaced
from kvredis.storage.disk.index import INDEX_NAME
from kvredis.storage.disk.segment import HEADER_BYTES, scratch
from kvredis.storage.disk.tier import DiskTier
from tests.storage.fake_files import FakeFiles, Fault
from tests.storage.small_store import Unwalked

from .small_disk import got, index_agrees, keys, put, small_disk, written

A, B, C = (b"a", 0), (b"b", 0), (b"c", 0)


def test_a_renamed_block_is_found_under_its_new_name_alone_and_after_a_restart_too(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"a", b"payload", expire_at_ms=5000)
        record = disk.get(*A)
        assert record is not None
        assert disk.rename(A, (b"new" * 500, 7)), "the header's bound is none for names that come later"
        assert disk.get(*A) is None
        assert disk.get(b"new" * 500, 7) is record
        assert record.written_as == A
        assert got(disk, b"new" * 500, 7) == b"payload"
        index_agrees(disk)
    with closing(small_disk(tmp_path)) as disk:
        found = disk.get(b"new" * 500, 7)
        assert found is not None
        assert (found.written_as, found.expire_at_ms) == (A, 5000)
        assert got(disk, b"new" * 500, 7) == b"payload"
        assert len(disk) == 1


def test_what_is_not_there_cannot_be_renamed_and_leaves_the_other_name_alone(disk: DiskTier) -> None:
    assert put(disk, b"b", b"stays")
    assert not disk.rename(A, B)
    assert not disk.rename(A, A)
    assert got(disk, b"b") == b"stays"
    index_agrees(disk)


def test_a_rename_to_its_own_name_changes_nothing(disk: DiskTier) -> None:
    assert put(disk, b"a", b"payload")
    assert disk.settle()
    assert disk.rename(A, A)
    assert not disk.unsettled
    assert got(disk, b"a") == b"payload"


def test_the_block_of_the_new_name_makes_way(disk: DiskTier) -> None:
    assert put(disk, b"a", b"of a")
    assert put(disk, b"b", b"of b")
    replaced = disk.get(*B)
    assert replaced is not None
    free_bytes = disk.free_bytes
    assert disk.rename(A, B)
    assert got(disk, b"b") == b"of a"
    assert not disk.read(replaced, scratch(10))
    index_agrees(disk)
    assert disk.free_bytes == free_bytes + replaced.extent.length


def test_names_may_go_round_in_a_circle_and_home_again(disk: DiskTier) -> None:
    assert put(disk, b"a", b"of a")
    assert put(disk, b"b", b"of b")
    for old, new in ((A, C), (B, A), (C, B)):
        assert disk.rename(old, new)
    assert (got(disk, b"a"), got(disk, b"b")) == (b"of b", b"of a")
    index_agrees(disk)
    for old, new in ((A, C), (B, A), (C, B)):
        assert disk.rename(old, new)
    assert (got(disk, b"a"), got(disk, b"b")) == (b"of a", b"of b")
    assert all(record.written_as == record.name for record in disk.records())
    index_agrees(disk)


def test_a_rename_is_no_use_so_the_coldest_stays_the_coldest(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        for key in (b"a", b"b", b"c"):
            assert put(disk, key, key)
        assert disk.rename(A, (b"z", 0))
        disk.swap(0, 1)
        assert keys(disk) == [b"z", b"b", b"c"]
    with closing(small_disk(tmp_path)) as disk:
        assert keys(disk) == [b"z", b"b", b"c"]


def test_what_happens_to_a_renamed_block_later_happens_to_its_new_name(disk: DiskTier) -> None:
    assert put(disk, b"a", b"payload")
    assert disk.rename(A, B)
    assert disk.set_expiry(*B, 9000)
    assert put(disk, b"a", b"another")
    index_agrees(disk)
    assert (got(disk, b"a"), got(disk, b"b")) == (b"another", b"payload")
    assert disk.forget(*B)
    index_agrees(disk)
    assert keys(disk) == [b"a"]


def test_a_block_may_be_renamed_under_a_reader(tmp_path: Path) -> None:
    class SlowFiles(FakeFiles):
        """Renames in the middle of a read."""

        def happen(self, what: str) -> Fault | None:
            if what.startswith("pread"):
                assert disk.rename(A, B)
                disk.swap(0, 1)
            return super().happen(what)

    with closing(small_disk(tmp_path, SlowFiles())) as disk:
        assert put(disk, b"a", b"payload")
        assert got(disk, b"a") == b"payload"
        assert disk.stats.quarantined == 0
        assert disk.get(b"b", 1) is not None
        index_agrees(disk)


def test_a_damaged_block_is_quarantined_under_the_name_that_it_has_now(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"a", b"payload")
        assert put(disk, b"c", b"payload")
        assert disk.rename(A, B)
        with open(tmp_path / "segment-0000.kv", "r+b") as file:
            file.seek(HEADER_BYTES + 2)
            file.write(b"!")
        assert got(disk, b"b") is None
        assert disk.get(*B) is None
        assert keys(disk) == [b"c"]
        index_agrees(disk)


# ---- writes that are under way ---------------------------------------------------------------------------------------


def test_what_was_written_before_another_block_took_its_name_comes_too_late(disk: DiskTier) -> None:
    assert put(disk, b"a", b"renamed")
    late = written(disk, b"b", b"late")
    assert late is not None
    assert disk.rename(A, B)
    assert not disk.publish(late)
    assert got(disk, b"b") == b"renamed"
    late = written(disk, b"b", b"late", space=1)
    assert late is not None
    disk.swap(0, 1)
    assert not disk.publish(late)
    assert got(disk, b"b", 1) == b"renamed"
    assert put(disk, b"b", b"new", space=1)
    assert got(disk, b"b", 1) == b"new"
    disk.check_integrity()


def test_no_record_is_looked_at_to_exchange_databases(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"a", b"one")
        assert put(disk, b"b", b"two", space=1)
        disk._spaces[:2] = Unwalked(disk._spaces[0]), Unwalked(disk._spaces[1])
        disk._pending.changes.update({space: Unwalked(rows) for space, rows in disk._pending.changes.items()})
        disk.swap(0, 1)
        disk._spaces[:2] = dict(dict.items(disk._spaces[0])), dict(dict.items(disk._spaces[1]))
        disk._pending.changes.update({space: dict(dict.items(rows)) for space, rows in disk._pending.changes.items()})
        assert (got(disk, b"a", 1), got(disk, b"b")) == (b"one", b"two")
        index_agrees(disk)
    with closing(small_disk(tmp_path)) as disk:
        assert (got(disk, b"a", 1), got(disk, b"b")) == (b"one", b"two")


def test_a_block_that_was_renamed_while_it_was_written_is_published_under_its_new_name(tmp_path: Path) -> None:
    with closing(small_disk(tmp_path)) as disk:
        record = written(disk, b"a", b"payload")
        assert record is not None
        record.rename(b"b", unplaced(3))
        assert disk.publish(record)
        assert got(disk, b"b", 3) == b"payload"
        assert disk.get(*A) is None
        index_agrees(disk)
    with closing(small_disk(tmp_path)) as disk:
        assert got(disk, b"b", 3) == b"payload"


def test_the_old_name_is_free_for_a_block_whose_write_ends_later(disk: DiskTier) -> None:
    assert put(disk, b"a", b"first")
    second = written(disk, b"a", b"second")
    assert second is not None
    assert disk.rename(A, B)
    assert disk.publish(second)
    assert (got(disk, b"a"), got(disk, b"b")) == (b"second", b"first")
    index_agrees(disk)


# ---- databases -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settled", [True, False])
def test_two_databases_change_places(tmp_path: Path, settled: bool) -> None:
    with closing(small_disk(tmp_path)) as disk:
        for space in (0, 1, 2):
            assert put(disk, b"both", b"of %d" % space, space)
        assert put(disk, b"only", b"here", 0)
        assert disk.forget(b"both", 2)
        if settled:
            assert disk.settle()
        disk.swap(0, 1)
        index_agrees(disk)
        disk.swap(1, 2)
        index_agrees(disk)
        assert (got(disk, b"both", 0), got(disk, b"both", 1), got(disk, b"both", 2)) == (b"of 1", None, b"of 0")
        assert got(disk, b"only", 2) == b"here"
    with closing(small_disk(tmp_path)) as disk:
        assert (got(disk, b"both", 0), got(disk, b"both", 1), got(disk, b"both", 2)) == (b"of 1", None, b"of 0")
        disk.swap(1, 2)
        disk.swap(0, 1)
        assert all(record.written_as == record.name for record in disk.records())
        index_agrees(disk)


def test_an_exchange_with_itself_or_of_two_empty_databases_is_nothing(disk: DiskTier) -> None:
    assert put(disk, b"a", b"payload")
    assert disk.settle()
    disk.swap(0, 0)
    disk.swap(3, 4)
    assert not disk.unsettled
    for _ in range(1000):
        disk.swap(0, 1)
        disk.swap(1, 2)
        disk.swap(2, 0)
    assert len(disk._pending) <= 1, "however often, it is one step for the index"
    index_agrees(disk)


# ---- hands that meddled ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", ["key=x'7a'", "space=5", "alias=NULL", "alias=x'00'", "alias=zeroblob(11)", "alias='text'"]
)
def test_a_renamed_row_that_turned_to_noise_never_makes_wrong_bytes(tmp_path: Path, change: str) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"a", b"payload")
        assert disk.rename(A, B)
    with closing(sqlite3.connect(tmp_path / INDEX_NAME, isolation_level=None)) as connection:
        connection.execute(f"UPDATE records SET {change}")
    with closing(small_disk(tmp_path)) as disk:
        assert all(got(disk, *record.name) is None for record in disk.records())
        assert put(disk, b"a", b"life goes on")


@pytest.mark.parametrize("change", ["key=x'7a'", "alias='text'"])
def test_a_swap_of_a_row_that_turned_to_noise_does_not_make_it_sound(tmp_path: Path, change: str) -> None:
    with closing(small_disk(tmp_path)) as disk:
        assert put(disk, b"a", b"payload")
        assert disk.rename(A, B)
        assert disk.settle()
        disk._index._do(f"UPDATE records SET {change}")
        disk.swap(0, 1)
        assert disk.settle()
    with closing(small_disk(tmp_path)) as disk:
        assert list(disk.records()) == []
