"""What a store with a disk comes back with after it was closed, or killed."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvredis.storage.background import IoThreads
from kvredis.storage.disk.tier import DiskOptions
from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import StoreOptions
from kvredis.storage.store import Store
from tests.storage.small_store import BLOCK_BYTES, BLOCKS, Clock, content, keys_in, read
from tests.storage.tiered_store import MIB, TieredStore

HOUR_MS = 3_600_000


@contextmanager
def real_store(
    directory: Path, *, save: bool = True, keep: bool = True, policy: str = "LRU", io_threads: int = 2
) -> Iterator[Store]:
    """A store as the server opens it, threads and all."""
    disk = DiskOptions(directory, 8 * MIB, False, MIB)
    options = StoreOptions(MIB, HugepageMode.OFF, policy, disk=disk, keep=keep, io_threads=io_threads)
    store = Store.open(options)
    try:
        yield store
    finally:
        store.close(save=save)


def get(store: Store, key: bytes, space: int = 0) -> bytes | None:
    """What a GET gives that waits."""
    assert store.tiering is not None
    come = threading.Event()
    bringing = store.tiering.bring([(key, space)], lambda _: come.set())
    if bringing is not None:
        assert come.wait(30)
    value = read(store, key, space)
    if bringing is not None:
        bringing.release()
    return value


def test_a_store_that_was_closed_comes_back_with_everything_it_had(tmp_path: Path) -> None:
    with real_store(tmp_path) as store:
        for number in range(BLOCKS + BLOCKS // 2):
            room = None
            while room is None:
                room = store.reserve(b"n:%d" % number, BLOCK_BYTES, number % 3, drop=False)
                if room is None and store.tiering is not None:
                    store.tiering.wait_for_room(0.05)
            room.view[:] = content(number)
            room.commit()
        assert store.put(b"small", b"value", 7)
        ends = store.now_ms() + HOUR_MS
        assert store.expire(b"n:0", ends)
        assert store.stats.evicted == 0
    with real_store(tmp_path) as store:
        assert len(store.index) == store.away == BLOCKS + BLOCKS // 2 + 1
        for number in range(BLOCKS + BLOCKS // 2):
            assert get(store, b"n:%d" % number, number % 3) == content(number)
        assert get(store, b"small", 7) == b"value"
        entry = store.find(b"n:0")
        assert entry is not None
        assert entry.expire_at_ms == ends
        assert store.collect_expired() == 0
        store.check_integrity()


def test_what_was_not_to_be_saved_is_not_there(tmp_path: Path) -> None:
    with real_store(tmp_path, save=False) as store:
        assert store.put(b"a", content(1))
    with real_store(tmp_path) as store:
        assert store.find(b"a") is None


def test_a_place_of_passage_comes_back_as_well(tmp_path: Path) -> None:
    with real_store(tmp_path, keep=False) as store:
        assert store.put(b"a", content(1))
    with real_store(tmp_path, keep=False) as store:
        assert get(store, b"a") == content(1)
        assert store.used_bytes == 0


def test_one_directory_has_one_store(tmp_path: Path) -> None:
    with real_store(tmp_path), pytest.raises(ConfigError, match="another server"):
        Store.open(StoreOptions(MIB, HugepageMode.OFF, disk=DiskOptions(tmp_path, 8 * MIB, False, MIB)))
    with real_store(tmp_path):
        pass


def test_with_one_thread_a_full_store_still_brings_saves_and_prefetches(tmp_path: Path) -> None:
    with real_store(tmp_path, io_threads=1) as store:
        assert store.tiering is not None
        for number in range(BLOCKS):
            assert store.put(b"n:%d" % number, content(number))
        saved: list[bool] = []
        done = threading.Event()

        def tell(answer: bool) -> None:
            saved.append(answer)
            done.set()

        store.tiering.saving.save(0, tell)
        assert done.wait(30)
        assert saved == [True]
        for number in range(BLOCKS):
            assert store.put(b"m:%d" % number, content(number + 100))
        finished = threading.Event()
        job = store.tiering.prefetch([b"n:%d" % number for number in range(BLOCKS)])
        assert job is not None
        job.add_done(lambda _: finished.set())
        assert get(store, b"n:9") == content(9)
        assert finished.wait(30)
        assert job.counts.done + job.counts.no_room == BLOCKS
        assert store.tiering.io.drain(30)
        store.check_integrity()


# ---- the order of eviction ---------------------------------------------------------------------------------------


def eviction_order(tiers: TieredStore) -> list[bytes]:
    """Who is given up first, of both tiers: what is on disk alone, then what memory holds."""
    here = [entry.key for entry in tiers.store.policy.victims()]
    return [key for key in tiers.on_disk() if key not in here] + here


def test_under_lru_the_order_of_eviction_survives_a_restart(tmp_path: Path) -> None:
    keys = [b"n:%02d" % number for number in range(BLOCKS * 2)]
    with TieredStore(tmp_path) as tiers:
        for key in keys:
            tiers.put(key)
            tiers.io.run()
        for key in (keys[3], keys[20], keys[0], keys[31]):
            assert tiers.get(key) == tiers.content(key)
        assert tiers.save()
        assert tiers.store.match([keys[25], keys[26], keys[5]]) == 3, "what was put off counts as well"
        tiers.store.collect_expired()
        before = eviction_order(tiers)
        assert sorted(before) == keys
        assert 0 < tiers.store.away < len(keys)
    with TieredStore(tmp_path) as tiers:
        assert tiers.on_disk() == before


def test_a_lookup_right_before_the_end_counts(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put(b"a", b"b", b"c")
        assert tiers.save()
        assert tiers.store.match([b"a"]) == 1
    with TieredStore(tmp_path) as tiers:
        assert tiers.on_disk() == [b"b", b"c", b"a"]


def test_the_order_goes_on_where_it_ended(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=MIB) as tiers:
        keys = [b"n:%02d" % number for number in range(BLOCKS)]
        tiers.put(*keys)
        assert tiers.save()
        tiers.store.touch([keys[0]])
    with TieredStore(tmp_path, disk_bytes=MIB) as tiers:
        tiers.put(b"new")
        assert tiers.save()
        assert tiers.store.find(keys[0]) is not None
        assert tiers.store.find(keys[1]) is None


# ---- without a close ---------------------------------------------------------------------------------------------


def test_a_killed_store_comes_back_with_what_was_saved_and_under_its_last_saved_name(tmp_path: Path) -> None:
    with TieredStore(tmp_path / "disk") as tiers:
        tiers.put(b"a", b"b", b"c")
        assert tiers.save()
        assert tiers.store.move((b"a", 0), (b"A", 2))
        tiers.store.swap(0, 1)
        assert tiers.store.put(b"b", content(60), 1)
        assert tiers.save()
        tiers.put(b"unsaved")
        tiers.files.leave_behind(tmp_path / "after")
    with TieredStore(tmp_path / "after") as tiers:
        assert sorted((entry.key, entry.space) for entry in tiers.store.index) == [(b"A", 2), (b"b", 1), (b"c", 1)]
        assert tiers.get(b"A", 2) == TieredStore.content(b"a")
        assert tiers.get(b"b", 1) == content(60)
        assert tiers.get(b"c", 1) == TieredStore.content(b"c")
        tiers.push_out()
        tiers.store.swap(1, 0)
        assert tiers.get(b"b") == content(60)


def test_a_block_whose_time_came_while_no_server_ran_is_not_there(tmp_path: Path) -> None:
    clock = Clock()
    with TieredStore(tmp_path, clock=clock) as tiers:
        tiers.put(b"a", b"b")
        assert tiers.store.expire(b"a", clock.ms() + 1000)
        assert tiers.store.expire(b"b", clock.ms() + 5000)
        assert tiers.save()
    clock.now_s += 2
    with TieredStore(tmp_path, clock=clock) as tiers:
        assert keys_in(tiers.store) == [b"b"]
        clock.now_s += 4
        assert tiers.store.collect_expired() == 1
        assert keys_in(tiers.store) == []


def test_a_store_that_cannot_begin_its_threads_lets_go_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(io: IoThreads) -> None:
        raise RuntimeError("can't start new thread")

    options = StoreOptions(MIB, HugepageMode.OFF, disk=DiskOptions(tmp_path, 4 * MIB, direct=False))
    monkeypatch.setattr(IoThreads, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        Store.open(options)
    monkeypatch.undo()
    Store.open(options).close()


def test_a_hand_that_comes_late_from_one_save_confirms_nothing_of_the_next(tiers: TieredStore) -> None:
    answers: list[tuple[bool, int]] = []

    def save() -> None:
        tiers.tiering.saving.save(0, lambda safe: answers.append((safe, len(tiers.store.unsaved))))

    def another() -> None:
        tiers.put(b"later")
        save()

    tiers.put(b"a", b"b")
    tiers.during("pwrite", another)
    save()
    tiers.io.run()
    assert answers == [(True, 1), (True, 0)]
