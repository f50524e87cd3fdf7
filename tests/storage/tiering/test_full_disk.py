"""What a disk that is full lets go of, and a store that must not let go of anything."""

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.store import Store
from kvredis.storage.tiering.transfers import State
from tests.storage.fake_files import FakeFiles, Fault, on
from tests.storage.small_store import ARENA_BYTES, BLOCK_BYTES, BLOCKS, content, fill, keys_in, read
from tests.storage.tiered_store import MIB, TieredStore

DISK_BLOCKS = 16
"""How many a disk of a MiB holds."""
ALL_BYTES = MIB - 512
"""The value that fills it."""


def names(first: int, count: int) -> list[bytes]:
    return [b"n:%02d" % number for number in range(first, first + count)]


def fill_disk(tiers: TieredStore) -> list[bytes]:
    """Leave as many blocks on disk alone as there is room for."""
    keys = names(0, DISK_BLOCKS)
    for key in keys:
        tiers.put(key)
    assert tiers.save()
    tiers.push_out()
    assert tiers.on_disk() == keys
    return keys


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[TieredStore]:
    with TieredStore(tmp_path, disk_bytes=MIB) as tiers:
        yield tiers


def test_a_full_disk_lets_the_coldest_go_and_its_key_is_gone(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    tiers.store.journal = []
    tiers.put(b"new")
    assert tiers.save()
    assert tiers.store.journal == [("set", b"new", 0), ("evicted", keys[0], 0)]
    assert tiers.store.find(keys[0]) is None
    assert tiers.store.stats.evicted == tiers.disk.stats.evicted == 1
    assert tiers.store.stats.evicted_bytes == BLOCK_BYTES
    assert [tiers.get(key) for key in keys[1:]] == [tiers.content(key) for key in keys[1:]]


def test_a_block_that_is_in_memory_as_well_loses_its_record_only_and_is_to_be_written_again(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=MIB, arena_bytes=2 * MIB) as tiers:
        keys = names(0, DISK_BLOCKS)
        tiers.put(*keys)
        assert tiers.save()
        tiers.put(b"new")
        assert tiers.save(tiers.store.writes)
        assert tiers.tier(keys[0]) == "memory"
        assert [entry.key for entry in tiers.store.unsaved] == [keys[0]]
        assert tiers.store.stats.evicted == 0
        assert tiers.save()
        tiers.push_out()
        assert tiers.get(keys[0]) == tiers.content(keys[0])
        assert len(tiers.store.index) == DISK_BLOCKS, "then it was another one's turn"


def test_a_block_that_was_touched_on_disk_leaves_it_later(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    assert tiers.store.touch(keys[:1]) == 1
    assert tiers.store.match(keys[1:3]) == 2
    tiers.store.collect_expired()
    tiers.put(*names(50, 2))
    assert tiers.save()
    assert [tiers.tier(key) for key in keys[:5]] == ["disk", "disk", "disk", None, None]


def test_a_run_that_is_away_leaves_the_disk_from_its_tail(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    assert tiers.store.match(keys) == DISK_BLOCKS
    tiers.put(*names(50, 3))
    tiers.store.collect_expired()
    assert tiers.save()
    assert tiers.store.match(keys) == DISK_BLOCKS - 3


def test_a_block_that_left_the_disk_while_it_was_asked_for_is_a_miss(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    bringing = tiers.bring((keys[0], 0))
    assert bringing is not None
    extent, left = tiers.disk.place(ALL_BYTES)  # as a thread that has not yet told the store
    assert extent is not None
    tiers.io.run()
    bringing.release()
    assert tiers.store.find(keys[0]) is None
    tiers.tiering.disk_io._have_left(left)
    tiers.disk.abandon(extent)
    assert tiers.store.away == 0
    assert tiers.disk.stats.quarantined == 0


def test_a_block_that_made_room_while_it_was_asked_for_is_counted_as_evicted_and_not_as_lost(
    tiers: TieredStore,
) -> None:
    keys = fill_disk(tiers)
    tiers.put(b"new")
    ended: list[State] = []
    asked = partial(tiers.tiering.promote, keys[0], 0, lambda transfer: ended.append(transfer.state))
    # Who writes has let the coldest go and tells the index of it, and only then the store.
    tiers.during("index: commit", lambda: (asked(), tiers.io.run()))
    assert tiers.save()
    assert ended == [State.FAILED]
    assert tiers.store.find(keys[0]) is None
    assert tiers.store.stats.evicted == tiers.store.stats.evicted_away == tiers.disk.stats.evicted == 1
    assert tiers.tiering.stats.lost == tiers.disk.stats.quarantined == 0


def test_a_block_that_left_the_disk_while_it_was_renamed_is_gone_under_both_names(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    tiers.store.journal = []
    extent, left = tiers.disk.place(BLOCK_BYTES)  # as a thread that has not yet told the store
    assert extent is not None
    assert tiers.store.move((keys[0], 0), (b"other", 0))
    assert tiers.store.find(keys[0]) is tiers.store.find(b"other") is None
    assert tiers.store.journal == [("del", keys[0], 0), ("set", b"other", 0), ("evicted", b"other", 0)]
    assert tiers.store.stats.evicted == 1
    tiers.tiering.disk_io._have_left(left)
    tiers.disk.abandon(extent)
    assert tiers.store.stats.evicted == 1


def test_a_block_that_left_the_disk_while_databases_were_exchanged_is_gone(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    assert tiers.get(keys[1]) == tiers.content(keys[1])
    extent, left = tiers.disk.place(ALL_BYTES)
    assert extent is not None
    tiers.store.swap(0, 1)
    tiers.tiering.disk_io._have_left(left)
    tiers.disk.abandon(extent)
    assert keys_in(tiers.store, 0) == []
    assert keys_in(tiers.store, 1) == [keys[1]]
    assert [entry.key for entry in tiers.store.unsaved] == [keys[1]], "memory has it still"


def test_a_value_longer_than_all_that_may_leave_the_disk_is_refused_by_it_and_stays(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=MIB, arena_bytes=2 * MIB) as tiers:
        tiers.put(b"a")
        assert tiers.store.put(b"long", content(1, MIB - 100))
        assert not tiers.save(2)
        assert read(tiers.store, b"long") == content(1, MIB - 100)


# ---- noeviction --------------------------------------------------------------------------------------------------


def test_without_eviction_blocks_go_to_disk_and_none_is_lost(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.store.evicts = False
        keys = names(0, 3 * BLOCKS)
        for key in keys:
            room = tiers.store.reserve(key, BLOCK_BYTES)
            while room is None:
                assert tiers.io.run()
                room = tiers.store.reserve(key, BLOCK_BYTES)
            room.view[:] = tiers.content(key)
            room.commit()
        assert tiers.store.stats.evicted == tiers.tiering.stats.spill_dropped == 0
        assert [tiers.get(key) for key in keys] == [tiers.content(key) for key in keys]


def test_without_eviction_a_failing_disk_means_that_there_is_no_room(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put_away(b"away")
        tiers.store.evicts = False
        keys = fill(tiers.store)
        tiers.files.plan = on("pwrite", Fault.EIO)
        assert tiers.store.reserve(b"more", BLOCK_BYTES) is None
        tiers.io.run()
        assert tiers.store.reserve(b"more", BLOCK_BYTES) is None
        assert tiers.get(b"away") is None, "it has no room either"
        assert tiers.tier(b"away") == "disk"
        assert [read(tiers.store, key) for key in keys] == [content(number) for number in range(BLOCKS)]
        assert tiers.store.stats.refused == 2


def test_without_eviction_what_the_disk_cannot_hold_stays(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.store.evicts = False
        long_key = b"k" * 1000
        assert tiers.store.put(long_key, content(1))
        for key in names(0, BLOCKS - 1):
            tiers.put(key)
        assert not tiers.save()
        assert tiers.store.reserve(b"all", 16 * BLOCK_BYTES) is None
        room = tiers.store.reserve(b"more", 14 * BLOCK_BYTES)
        assert room is not None
        room.abort()
        assert read(tiers.store, long_key) == content(1)


def test_without_eviction_what_was_never_used_is_written_too(tmp_path: Path) -> None:
    with TieredStore(tmp_path, policy="S3FIFO") as tiers:
        tiers.store.evicts = False
        keys = fill(tiers.store)
        assert tiers.store.reserve(b"more", BLOCK_BYTES) is None
        tiers.io.run()
        room = tiers.store.reserve(b"more", BLOCK_BYTES)
        assert room is not None
        room.abort()
        assert [tiers.get(key) for key in keys] == [content(number) for number in range(BLOCKS)]


def test_without_eviction_small_values_make_room_for_one_another_on_disk(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=16 * MIB) as tiers:
        tiers.store.evicts = False
        tiers.store.inline_bytes_high = 512 * 1024
        count = 2 * tiers.store.inline_bytes_high // (15 * 1024)
        for number in range(count):
            assert tiers.store.put(b"small:%d" % number, content(number, 15 * 1024))
            tiers.io.run()
        assert len(tiers.store.index) == count
        assert tiers.store.inline_bytes <= tiers.store.inline_bytes_high
        tiers.files.plan = on("pwrite", Fault.ENOSPC)
        while tiers.store.put(b"over:%d" % count, content(count, 15 * 1024)):
            tiers.io.run()
            count += 1
        assert tiers.store.stats.evicted == 0


def test_without_eviction_a_full_disk_lets_go_of_nothing(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    tiers.store.evicts = False
    tiers.put(b"new")
    assert not tiers.save(tiers.store.writes)
    assert [tiers.tier(key) for key in keys] == ["disk"] * DISK_BLOCKS


def test_a_disk_that_cannot_be_written_does_not_lose_what_can_be_read(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)[1:]
    tiers.files.plan = on("pwrite", Fault.EIO)
    tiers.put(b"new")
    for _ in range(DISK_BLOCKS // 2):
        tiers.save(tiers.store.writes)
    assert [tiers.get(key) for key in keys] == [tiers.content(key) for key in keys]


def test_a_block_that_is_sent_for_is_not_pushed_off_the_disk_by_what_leaves_memory_for_it(tiers: TieredStore) -> None:
    keys = fill_disk(tiers)
    fill(tiers.store)
    bringing = tiers.bring(*((key, 0) for key in keys[:3]))
    assert bringing is not None
    tiers.io.run()
    assert [read(tiers.store, key) for key in keys[:3]] == [tiers.content(key) for key in keys[:3]]
    bringing.release()
    assert tiers.store.find(keys[3]) is None, "it was the coldest then"


# The end of a store whose disk has stopped answering: it comes, and says so.

HUNG_AFTER_S = 0.3


LONG_S = 60.0


class HungDisk:
    """A store over a disk, with threads, that hangs at a step of the given kind until `woken`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.woken = threading.Event()
        self.hangs = threading.Event()
        self._kind = kind
        files = FakeFiles(self._happen)
        disk = DiskTier.open(DiskOptions(folder, 4 * MIB, False, MIB), files, 0)
        self.store = Store(Arena.create(ARENA_BYTES, HugepageMode.OFF))
        self.store.add_disk(disk, io_threads=2)
        assert self.store.tiering is not None
        self.tiering = self.store.tiering
        self.tiering.hung_after_s = HUNG_AFTER_S
        assert self.store.put(b"key", content(1))
        self._armed = True

    _armed = False

    def _happen(self, _: int, what: str) -> Fault | None:
        if self._armed and what.startswith(self._kind):
            self.hangs.set()
            assert self.woken.wait(LONG_S)
        return None


@pytest.fixture(params=["pwrite", "sync segment", "index: begin", "index: commit"])
def hung(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HungDisk]:
    hung = HungDisk(tmp_path, request.param)
    yield hung
    hung.woken.set()


@pytest.mark.parametrize("save", [True, False], ids=["saving", "not saving"])
def test_a_store_ends_behind_a_disk_that_hangs_and_says_so(
    hung: HungDisk, save: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[bool] = []
    hung.tiering.saving.save(0, told.append)
    assert hung.hangs.wait(LONG_S)
    with caplog.at_level(logging.WARNING):
        hung.store.close(save=save)
    assert told == [False], "who waits for a save hears"
    assert any("the device does not answer" in message for message in caplog.messages)


def test_a_store_that_hangs_only_while_its_disk_is_closed_ends_too(tmp_path: Path) -> None:
    hung = HungDisk(tmp_path, "index: commit")
    assert hung.tiering.disk.unsettled is False
    hung.store.close(save=False)
    assert hung.hangs.is_set()
    hung.woken.set()


def test_a_device_that_is_slow_and_answers_is_waited_for(tmp_path: Path) -> None:
    """Ten writes, each of which takes longer than a third of what a hung one is given."""
    hung = HungDisk(tmp_path, "nothing")
    writing = threading.Event()

    def slowly(_: int, what: str) -> Fault | None:
        if what.startswith("pwrite"):
            writing.wait(HUNG_AFTER_S / 3)
        return None

    files = hung.tiering.disk._files
    assert isinstance(files, FakeFiles)
    files.plan = slowly
    for number in range(10):
        assert hung.store.put(b"n:%d" % number, content(number))
    hung.store.close(save=True)
    with closing(DiskTier.open(DiskOptions(tmp_path, 4 * MIB, False, MIB), None, 0)) as disk:
        assert len(disk) == 11
