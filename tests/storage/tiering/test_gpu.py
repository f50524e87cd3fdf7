"""Blocks in GPU memory, with a library in libcuda's place: how they get to memory and to disk, and what they hold."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvredis.storage.disk.tier import DiskOptions, DiskTier
from kvredis.storage.eviction.base import make_policy
from kvredis.storage.memory import cuda
from kvredis.storage.memory.arena import Arena, HugepageMode
from kvredis.storage.memory.device_arena import DeviceArena
from kvredis.storage.store import Store
from kvredis.storage.tiering.gpu import ABANDONED_S, LIFTED_FOR_S, GpuReservation, GpuTier
from kvredis.storage.tiering.manager import Bringing, Tiering
from tests.stand_in_cuda import stand_in_cuda
from tests.storage.small_store import Clock, content, read

from .fake_io import ManualIo

MIB = 1024 * 1024
BLOCK_BYTES = 256 * 1024
BLOCKS = 2 * MIB // BLOCK_BYTES
"""How many fill the GPU's memory."""


class OnGpu:
    """A store of 4 MiB beside 2 MiB on a GPU, whose copies run when the test says so."""

    def __init__(self) -> None:
        self.clock, self.io = Clock(), ManualIo()
        self.io.clock = self.clock
        self.store = self.open()

    def open(self) -> Store:
        arena = Arena.create(4 * MIB, HugepageMode.OFF)
        store = Store(arena, policy=make_policy("LRU"), clock_ms=self.clock.ms, clock_s=self.clock.seconds)
        self.gpu = store.gpu = GpuTier(store, DeviceArena.create(2 * MIB), self.io)
        return store

    def reserve(self, key: bytes, *, drop: bool = False) -> GpuReservation | None:
        return self.gpu.reserve(key, BLOCK_BYTES, drop=drop)

    def put(self, *keys: bytes, drop: bool = False) -> None:
        """Write blocks on the GPU as a client does."""
        for key in keys:
            room = self.reserve(key, drop=drop)
            assert room is not None
            self.gpu.arena.write(room.place.offset, self.content(key))
            self.clock.now_s += 1
            assert room.commit()

    @staticmethod
    def content(key: bytes) -> bytes:
        return content(sum(key), BLOCK_BYTES)

    def at(self, offset: int) -> bytes:
        found = bytearray(BLOCK_BYTES)
        self.gpu.arena.read(offset, found)
        return bytes(found)

    def get(self, key: bytes) -> bytes | None:
        """What a GET gives, which waits for the block."""
        bringing = self.gpu.bring([(key, 0)], lambda _: None)
        self.io.run()
        try:
            return read(self.store, key)
        finally:
            if bringing is not None:
                bringing.release()

    def tier(self, key: bytes) -> str | None:
        entry = self.store.find(key)
        return None if entry is None else self.store.tier_of(entry)


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a test says which copies fail."""
    monkeypatch.setenv(cuda.LIBRARY_VARIABLE, str(stand_in_cuda()))
    monkeypatch.setenv("STAND_IN_CUDA_FAILS", str(tmp_path / "fails"))
    return tmp_path / "fails"


@pytest.fixture
def on(fails: Path) -> Iterator[OnGpu]:
    on = OnGpu()
    yield on
    fails.unlink(missing_ok=True)
    on.store.check_integrity()
    on.store.close()


def keys(count: int, prefix: bytes = b"k") -> list[bytes]:
    return [prefix + b"%d" % number for number in range(count)]


def test_a_block_on_the_gpu_is_copied_to_memory_for_a_reader_without_one(on: OnGpu) -> None:
    on.put(b"a")
    assert on.store.fetch(b"a") is None
    assert on.tier(b"a") == "gpu"
    assert on.get(b"a") == on.content(b"a")
    assert on.tier(b"a") == "memory"
    assert on.gpu.has(on.store.index.get(b"a", 0))  # type: ignore[arg-type]
    figures = on.store.tiers()
    assert (figures["gpu"]["entries"], figures["memory"]["entries"]) == (1, 1)


def test_readers_who_ask_at_once_share_one_copy(on: OnGpu) -> None:
    on.put(b"a")
    told: list[object] = []
    bringings = [on.gpu.bring([(b"a", 0)], told.append) for _ in range(3)]
    assert on.io.run() == 1
    assert told == bringings


def test_the_coldest_are_copied_to_memory_before_they_leave_the_gpu(on: OnGpu) -> None:
    names = keys(BLOCKS)
    on.put(*names)
    assert on.reserve(b"more") is None
    on.io.run()
    on.put(b"more")
    assert [on.tier(name) for name in names] == ["memory", *["gpu"] * (BLOCKS - 1)]
    assert all(on.get(name) == on.content(name) for name in [*names, b"more"])
    assert on.store.stats.evicted == on.gpu.stats.spill_dropped == 0


def test_a_writer_that_cannot_wait_drops_the_coldest_and_that_is_counted(on: OnGpu) -> None:
    names = keys(BLOCKS)
    on.put(*names)
    on.put(b"more", drop=True)
    assert on.tier(names[0]) is None
    assert on.store.stats.evicted == on.gpu.stats.spill_dropped == 1


def test_without_eviction_a_full_gpu_refuses_what_memory_cannot_take(on: OnGpu) -> None:
    on.store.set_eviction(None)
    on.put(*keys(BLOCKS))
    assert on.reserve(b"more", drop=True) is None
    assert on.gpu.stats.refused == 1
    on.io.run()
    assert on.reserve(b"more", drop=True) is not None


def test_memory_lets_a_block_go_that_the_gpu_has(on: OnGpu) -> None:
    on.put(b"a")
    on.get(b"a")
    room = on.store.reserve(b"all of it", on.store.arena.nbytes - 4096)
    assert room is not None
    assert on.tier(b"a") == "gpu"
    room.abort()
    assert on.get(b"a") == on.content(b"a")


def test_a_lease_keeps_the_bytes_whatever_becomes_of_the_key(on: OnGpu) -> None:
    on.put(b"a")
    lease = on.gpu.lease(b"a", 0, 60.0)
    assert lease is not None
    on.put(b"a")
    on.store.delete([b"a"])
    on.put(*keys(BLOCKS - 1))
    assert on.reserve(b"more") is None
    assert on.at(lease.offset) == on.content(b"a")
    assert on.gpu.retired_bytes == BLOCK_BYTES
    assert lease.release()
    assert not lease.release()
    assert on.gpu.retired_bytes == 0
    on.put(b"more")


def test_a_lease_ends_by_its_limit(on: OnGpu) -> None:
    on.put(b"a")
    lease = on.gpu.lease(b"a", 0, 5.0)
    assert lease is not None
    on.clock.now_s += 6
    on.gpu.tick()
    assert not lease.held
    assert on.store.stats.leases_revoked == 1


def test_a_block_used_on_the_gpu_is_not_the_coldest(on: OnGpu) -> None:
    names = keys(BLOCKS)
    on.put(*names)
    lease = on.gpu.lease(names[0], 0, 5.0)
    assert lease is not None
    lease.release()
    on.put(b"more", drop=True)
    assert [on.tier(name) for name in names[:3]] == ["gpu", None, "gpu"]


def test_the_order_on_the_gpu_is_of_the_stores_kind(on: OnGpu) -> None:
    names = keys(BLOCKS)
    on.put(*names)
    on.store.set_eviction(make_policy("MRU"))
    on.put(b"more", drop=True)
    assert on.store.tiers()["gpu"]["policy"] == "MRU"
    assert on.tier(names[-1]) is None
    assert on.tier(names[0]) == "gpu"


@pytest.mark.parametrize("gone", [False, True])
def test_room_of_a_writer_who_left_without_a_word_is_kept_until_it_cannot_write(on: OnGpu, gone: bool) -> None:
    room = on.reserve(b"a")
    assert room is not None
    ended = False
    room.is_gone = lambda: ended
    room.abort()
    on.gpu.tick()
    assert on.gpu.abandoned_bytes == BLOCK_BYTES
    on.put(*keys(BLOCKS - 1))
    assert on.reserve(b"more", drop=False) is None
    ended = gone
    on.clock.now_s += 0 if gone else ABANDONED_S
    on.gpu.tick()
    assert on.gpu.abandoned_bytes == 0
    assert on.reserve(b"more") is not None


def test_room_of_a_writer_who_says_so_is_free_at_once(on: OnGpu) -> None:
    room = on.reserve(b"a")
    assert room is not None
    room.is_quiet = True
    room.abort()
    assert on.gpu.used_bytes == 0


def test_a_name_takes_its_block_along_and_an_end_ends_it(on: OnGpu) -> None:
    on.put(b"a", b"b")
    assert on.store.move((b"a", 0), (b"b", 0))
    assert on.gpu.live_bytes == BLOCK_BYTES
    on.store.swap(0, 1)
    assert on.store.find(b"b", 1) is not None
    lease = on.gpu.lease(b"b", 1, 5.0)
    assert lease is not None
    assert on.at(lease.offset) == on.content(b"a")
    lease.release()
    on.store.expire(b"b", on.clock.ms() + 1000, 1)
    on.clock.now_s += 2
    on.store.collect_expired()
    assert on.gpu.used_bytes == on.store.away == 0


@pytest.mark.parametrize(
    "leave",
    [
        lambda store: store.move((b"a", 0), (b"b", 0)),
        lambda store: store.swap(0, 1),
        lambda store: store.flush(later=True),
    ],
    ids=["rename", "swap", "flush"],
)
def test_a_block_comes_whose_name_another_had_as_it_was_copied(
    on: OnGpu, leave: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, waits = on.gpu.arena.read, []

    def read_and_change(offset: int, into: memoryview) -> None:
        monkeypatch.undo()
        copy(offset, into)
        leave(on.store)
        on.put(b"a")
        waits.append(on.gpu.bring([(b"a", 0)], lambda _: None))

    on.put(b"a")
    on.gpu.bring([(b"a", 0)], lambda _: None)
    monkeypatch.setattr(on.gpu.arena, "read", read_and_change)
    on.io.run()
    assert len(waits) == 1
    assert read(on.store, b"a") == on.content(b"a")


@pytest.mark.parametrize("held", [False, True])
def test_a_flush_gives_all_of_it_back(on: OnGpu, held: bool) -> None:
    on.put(*keys(BLOCKS))
    lease = on.gpu.lease(b"k0", 0, 5.0) if held else None
    assert on.store.flush() == BLOCKS
    assert on.gpu.used_bytes == BLOCK_BYTES * held
    if lease is not None:
        lease.release()
    assert on.gpu.used_bytes == on.store.away == 0


def test_a_value_in_memory_that_is_also_on_the_gpu_is_not_patched_in_place(on: OnGpu) -> None:
    on.put(b"a")
    on.get(b"a")
    assert not on.store.patch(b"a", 0, b"new")


def test_a_failed_copy_is_a_miss_with_a_line_in_the_log(
    on: OnGpu, fails: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on.put(b"a", b"b")
    fails.write_text("1")
    with caplog.at_level(logging.WARNING):
        assert on.get(b"a") is None
    assert "a block could not be read and is a miss: cuMemcpyDtoHAsync_v2: unspecified launch failure" in caplog.text
    assert on.tier(b"a") is None
    assert on.gpu.stats.lost_blocks == 1
    assert on.get(b"b") == on.content(b"b")


def test_a_gpu_that_answers_nothing_is_given_up_and_what_memory_has_stays(
    on: OnGpu, fails: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on.put(b"a", b"b", b"c")
    on.get(b"b")
    lease = on.gpu.lease(b"c", 0, 5.0)
    fails.write_text("-1")
    assert on.get(b"a") is None
    assert [record.message[:60] for record in caplog.records] == [
        "GPU memory: the GPU answers nothing any more and is given up,"[:60]
    ]
    assert [on.tier(key) for key in (b"a", b"b", b"c")] == [None, "memory", None]
    assert on.reserve(b"d", drop=True) is None
    assert on.store.tiers()["gpu"]["lost"] == 1
    assert lease is not None
    lease.release()
    assert on.get(b"b") == on.content(b"b")


def test_what_is_saved_is_read_from_the_gpu_and_comes_back_after_a_crash(fails: Path, tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    options = DiskOptions(directory, 8 * MIB, False, MIB)
    on = OnGpu()
    on.store.add_disk(DiskTier.open(options))
    on.put(b"a", b"b")
    on.store.close(save=True)
    on.store = on.open()
    on.store.add_disk(DiskTier.open(options))
    assert [on.tier(key) for key in (b"a", b"b")] == ["disk"] * 2
    on.store.close()


@pytest.fixture
def over(on: OnGpu, tmp_path: Path) -> Iterator[Tiering]:
    """The tiers of that store with a disk, whose jobs run when the test says so, too."""
    disk = DiskTier.open(DiskOptions(tmp_path / "disk", 16 * MIB, False, MIB), now_ms=on.clock.ms())
    tiering = on.store.tiering = Tiering(on.store, disk, ManualIo(), 0.5)
    tiering.gpu = on.gpu
    yield tiering
    on.store.tiering = None
    tiering.close(save=False)


def test_a_block_that_leaves_the_gpu_before_its_copy_begins_comes_from_disk(on: OnGpu, over: Tiering) -> None:
    on.put(b"a")
    over.saving.save(0, lambda _: None)
    over.io.drain(0.0)
    wait = over.bring([(b"a", 0)], lambda _: None)
    on.put(*keys(BLOCKS), drop=True)
    assert on.tier(b"a") == "disk"
    on.io.run()
    assert read(on.store, b"a") == on.content(b"a")
    assert wait is not None
    wait.release()


def test_a_block_comes_that_left_the_gpu_as_its_way_to_disk_ended(on: OnGpu, over: Tiering) -> None:
    def leave_and_ask() -> None:
        over.call_on_room(lambda: None)
        on.put(*keys(BLOCKS), drop=True)
        waits.append(over.bring([(b"a", 0)], lambda _: None))

    waits: list[Bringing | None] = []
    on.put(b"a")
    entry = on.store.find(b"a")
    assert entry is not None
    over.call_on_room(leave_and_ask)
    over.spill([entry])
    over.io.drain(0.0)
    assert read(on.store, b"a") == on.content(b"a")
    (wait,) = waits
    assert wait is not None
    wait.release()


def test_a_value_that_memory_could_never_take_is_refused(on: OnGpu) -> None:
    assert on.gpu.reserve(b"a", 4 * MIB, drop=True) is None


def test_a_block_in_memory_comes_to_the_gpu_when_clients_there_lease_it_again(on: OnGpu) -> None:
    assert on.store.put(b"a", on.content(b"a"))
    entry = on.store.index.get(b"a", 0)
    assert entry is not None
    for uses, there in ((1, False), (2, True)):
        lease = on.store.lease(b"a")
        assert lease is not None
        assert entry.hits == uses
        on.gpu.lift([entry])
        on.io.run()
        lease.release()
        assert on.gpu.has(entry) is there
    lease_there = on.gpu.lease(b"a", 0, 5.0)
    assert lease_there is not None
    assert on.at(lease_there.offset) == on.content(b"a")
    lease_there.release()
    on.gpu.lift([entry])
    assert on.io.run() == 0, "it is there"


def test_a_block_that_changes_on_its_way_to_the_gpu_does_not_arrive(on: OnGpu) -> None:
    assert on.store.put(b"a", on.content(b"a"))
    entry = on.store.index.get(b"a", 0)
    assert entry is not None
    entry.hits = 2
    on.gpu.lift([entry])
    assert not on.store.patch(b"a", 0, b"new")
    on.store.delete([b"a"])
    on.io.run()
    assert on.gpu.used_bytes == on.store.used_bytes == 0


def test_no_block_leaves_the_gpu_unread_for_one_that_memory_has(on: OnGpu) -> None:
    on.put(*keys(BLOCKS))
    assert on.store.put(b"a", on.content(b"a"))
    entry = on.store.index.get(b"a", 0)
    assert entry is not None
    entry.hits = 2
    on.gpu.lift([entry])
    assert not on.gpu.has(entry)
    on.io.run()
    assert on.get(b"k0") == on.content(b"k0")
    on.gpu.lift([entry])
    on.io.run()
    assert not on.gpu.has(entry), "k0 was used a moment ago"
    on.clock.now_s += LIFTED_FOR_S
    on.gpu.lift([entry])
    on.io.run()
    assert on.gpu.has(entry)
    assert on.tier(b"k0") == "memory"


def test_a_gpu_that_dies_as_a_block_comes_is_given_up(on: OnGpu, fails: Path) -> None:
    on.put(b"b")
    assert on.store.put(b"a", on.content(b"a"))
    entry = on.store.index.get(b"a", 0)
    assert entry is not None
    entry.hits = 2
    on.gpu.lift([entry])
    fails.write_text("-1")
    on.io.run()
    assert on.gpu.is_lost
    assert on.gpu.used_bytes == 0
    assert on.get(b"a") == on.content(b"a")


def test_blocks_that_stand_in_the_way_of_a_long_value_are_copied_first(on: OnGpu) -> None:
    names = keys(BLOCKS)
    on.put(*names)
    for name in names[::2]:  # elsewhere too, but none of them beside another
        on.get(name)
    assert on.gpu.reserve(b"long", 3 * BLOCK_BYTES, drop=False) is None
    on.io.run()
    assert on.gpu.reserve(b"long", 3 * BLOCK_BYTES, drop=False) is not None
    assert on.store.stats.evicted == 0
