"""Blocks on their way to disk: who is written, when, and what it costs those who store."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvredis.storage.background import Priority
from kvredis.storage.tiering import disk_io
from kvredis.storage.tiering.manager import Bringing
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import BLOCK_BYTES, BLOCKS, content, fill, present, read
from tests.storage.tiered_store import MIB, TieredStore

KEYS = [b"key:%d" % number for number in range(BLOCKS)]
SMALL_BYTES = 15 * 1024


def test_a_block_that_leaves_an_idle_disk_behind_comes_back_bit_for_bit(tiers: TieredStore) -> None:
    for key in [*KEYS, b"more:1", b"more:2", b"more:3"]:
        tiers.put(key)
        tiers.io.run()
    assert [tiers.tier(key) for key in KEYS[:3]] == ["disk"] * 3
    assert tiers.tiering.stats.spill_dropped == tiers.store.stats.evicted == 0
    assert all(tiers.get(key) == tiers.content(key) for key in KEYS)


RUNS_DISK_BYTES = 16 * MIB
"""Of so large a disk a run may be four blocks."""


def test_the_coldest_are_written_some_in_a_call_and_come_back_bit_for_bit(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=RUNS_DISK_BYTES) as tiers:
        for key in KEYS[:-4]:
            tiers.put(key)
        assert tiers.io.run() < len(KEYS) // 2
        written = tiers.on_disk()
        assert written == KEYS[: len(written)]
        assert 1 <= tiers.steps("pwrite") <= -(-len(written) // 4) + 1 < len(written)
        tiers.push_out()
        assert all(tiers.get(key) == tiers.content(key) for key in written)


def test_a_block_that_is_written_over_while_its_run_is_written_is_not_the_old_one(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=RUNS_DISK_BYTES) as tiers:
        tiers.put(*KEYS[:4])
        tiers.during("pwrite", lambda: (tiers.store.put(KEYS[1], b"new" * 10_000), tiers.store.delete([KEYS[2]])))
        assert tiers.save(), "of what there was when it began"
        assert read(tiers.store, KEYS[1]) == b"new" * 10_000
        assert tiers.save()
        tiers.push_out()
        expected = {KEYS[0]: tiers.content(KEYS[0]), KEYS[1]: b"new" * 10_000, KEYS[3]: tiers.content(KEYS[3])}
        assert {key: tiers.get(key) for key in KEYS[:4]} == {**expected, KEYS[2]: None}


def test_a_run_that_the_device_refuses_is_written_block_by_block(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=RUNS_DISK_BYTES) as tiers:
        tiers.put(b"first")
        assert tiers.save()
        tiers.put(*KEYS[:4])
        refused = iter([Fault.EIO])
        tiers.files.plan = lambda _, what: next(refused, None) if what.startswith("pwrite segment") else None
        assert tiers.save()
        assert tiers.tiering.stats.spill_failed == 0
        assert {*tiers.on_disk()} == {b"first", *KEYS[:4]}


def test_a_block_that_the_disk_has_leaves_without_a_write(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    assert tiers.get(b"a") == tiers.content(b"a")
    writes, unloaded = tiers.steps("pwrite"), tiers.tiering.stats.unloaded
    tiers.push_out()
    tiers.io.run()
    assert tiers.tier(b"a") == "disk"
    assert (tiers.steps("pwrite"), tiers.tiering.stats.unloaded) == (writes, unloaded + 1)


def test_the_coldest_are_written_before_the_arena_is_full(tiers: TieredStore) -> None:
    for key in KEYS[: BLOCKS // 2]:
        tiers.put(key)
    tiers.io.run()
    assert not tiers.on_disk(), "half is free: there is no haste"
    for key in KEYS[BLOCKS // 2 : -4]:
        tiers.put(key)
    tiers.io.run()
    written = tiers.on_disk()
    assert written == KEYS[: len(written)] != []
    assert tiers.tier(KEYS[0]) == "memory", "it need not leave yet"


def test_a_full_arena_is_written_no_further_ahead_than_half(tiers: TieredStore) -> None:
    for key in KEYS:
        tiers.put(key)
        tiers.io.run()
    written = tiers.on_disk()
    assert written == KEYS[: len(written)]
    assert BLOCKS // 2 - 2 <= len(written) <= BLOCKS // 2


def test_what_comes_at_once_after_the_disk_had_time_is_taken_without_a_loss(tiers: TieredStore) -> None:
    kept = []
    for batch in range(4):
        for number in range(BLOCKS // 2 - 2):
            kept.append(b"batch:%d:%d" % (batch, number))
            tiers.put(kept[-1])  # faster than any disk: none of its jobs begins
        tiers.io.run()  # while the engine computes the next
    assert tiers.tiering.stats.spill_dropped == tiers.store.stats.evicted == 0
    assert all(tiers.get(key) == tiers.content(key) for key in kept)


def test_a_block_is_read_in_memory_while_it_is_written(tiers: TieredStore) -> None:
    tiers.put(b"a")
    seen: list[bytes | None] = []
    tiers.during("pwrite", lambda: seen.append(read(tiers.store, b"a")))
    assert tiers.save()
    assert seen == [tiers.content(b"a")]
    assert tiers.steps("pread") == 0


def test_a_block_does_not_leave_memory_while_it_is_written(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.during("pwrite", lambda: tiers.put(*KEYS))
    assert tiers.save(1)
    assert tiers.tier(b"a") == "memory"
    assert read(tiers.store, b"a") == tiers.content(b"a")


def test_a_caller_that_cannot_wait_drops_the_coldest_unwritten_and_that_is_counted(tiers: TieredStore) -> None:
    fill(tiers.store)
    tiers.put(b"late")
    assert tiers.tier(b"fill:0") is None
    assert tiers.tiering.stats.spill_dropped == tiers.store.stats.evicted == 1


def test_a_caller_that_can_wait_is_refused_until_the_disk_has_made_room(tiers: TieredStore) -> None:
    fill(tiers.store)
    told: list[str] = []
    tiers.tiering.call_on_room(lambda: told.append("room"))
    assert tiers.store.reserve(b"patient", BLOCK_BYTES, drop=False) is None
    assert tiers.store.stats.refused == 0
    assert tiers.tiering.makes_room
    tiers.io.run()
    assert told
    room = tiers.store.reserve(b"patient", BLOCK_BYTES, drop=False)
    assert room is not None
    room.abort()
    assert tiers.tier(b"fill:0") == "disk"
    assert tiers.tiering.stats.spill_dropped == 0


def test_a_value_of_many_blocks_has_all_of_them_written_that_stand_in_its_way(tiers: TieredStore) -> None:
    fill(tiers.store)
    assert tiers.store.reserve(b"long", 6 * BLOCK_BYTES, drop=False) is None
    tiers.io.run()
    room = tiers.store.reserve(b"long", 6 * BLOCK_BYTES, drop=False)
    assert room is not None
    room.abort()
    assert tiers.store.stats.evicted == 0


def test_a_disk_that_fails_is_not_worth_waiting_for_until_a_write_succeeds(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.files.plan = on("pwrite", Fault.EIO)
    assert not tiers.save()
    assert not tiers.tiering.makes_room
    assert tiers.tiering.stats.spill_failed == 1
    assert read(tiers.store, b"a") == tiers.content(b"a")
    tiers.files.plan = None
    assert tiers.save()
    assert tiers.tiering.makes_room


def test_a_caller_that_waited_while_nothing_was_written_keeps_others_from_waiting(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.tiering.waited_in_vain(tiers.clock.now_s + 1)
    assert not tiers.tiering.makes_room
    tiers.clock.now_s += 2
    assert tiers.save()
    assert tiers.tiering.makes_room
    tiers.tiering.waited_in_vain(tiers.clock.now_s - 1)
    assert tiers.tiering.makes_room, "the disk has written since then"


def test_a_failed_write_leaves_the_block_to_be_written_again(tiers: TieredStore) -> None:
    fill(tiers.store)
    tiers.files.plan = on("pwrite", Fault.EIO)
    assert tiers.store.reserve(b"x", BLOCK_BYTES, drop=False) is None
    tiers.io.run()
    assert len(tiers.store.unsaved) == BLOCKS
    tiers.files.plan = None
    assert tiers.store.reserve(b"x", BLOCK_BYTES, drop=False) is None
    tiers.io.run()
    room = tiers.store.reserve(b"x", BLOCK_BYTES, drop=False)
    assert room is not None
    room.abort()


@pytest.mark.parametrize("words", ["pwrite", "pread"])
def test_a_job_that_dies_leaves_no_hold_and_no_account_behind(words: str, tiers: TieredStore) -> None:
    tiers.put_away(b"away")
    tiers.put(b"a")
    tiers.during(words, lambda: 1 / 0)
    tiers.tiering.spill(list(tiers.store.unsaved))
    bringing = tiers.bring((b"away", 0))
    assert bringing is not None
    tiers.io.run()
    bringing.release()
    assert tiers.store.leases == tiers.store.reserved_bytes == 0
    assert read(tiers.store, b"a") == tiers.content(b"a")


def test_what_the_disk_cannot_hold_leaves_unwritten_and_is_no_failure_of_the_disk(tmp_path: Path) -> None:
    with TieredStore(tmp_path, arena_bytes=4 * 1024 * 1024) as tiers:
        long_key = b"k" * 1000
        assert tiers.store.put(long_key, content(1))
        assert tiers.store.put(b"longer than a segment", content(2, 1024 * 1024))
        assert not tiers.save(), "it is not there"
        assert tiers.tiering.makes_room
        assert tiers.tiering.stats.spill_failed == tiers.steps("pwrite") == 0
        tiers.push_out()
        assert tiers.tier(long_key) is tiers.tier(b"longer than a segment") is None
        assert tiers.tiering.stats.spill_dropped == 0


def test_a_queue_that_is_full_delays_spills_and_loses_none(tiers: TieredStore) -> None:
    tiers.io.queue_jobs_max = 1
    fill(tiers.store)
    for _ in range(3):
        assert tiers.store.reserve(b"long", 3 * BLOCK_BYTES, drop=False) is None
        tiers.io.run()
    room = tiers.store.reserve(b"long", 3 * BLOCK_BYTES, drop=False)
    assert room is not None
    room.abort()
    assert tiers.store.stats.evicted == 0


def test_spills_go_behind_everything_else(tiers: TieredStore) -> None:
    tiers.put(b"a")
    tiers.tiering.spill(list(tiers.store.unsaved))
    assert tiers.io.figures()[Priority.SPILL].queued == 1
    assert tiers.tiering.figures()["queued_spills"] == 1


# ---- small values ------------------------------------------------------------------------------------------------


def small(tiers: TieredStore, count: int, *, run: bool = True) -> list[bytes]:
    """Put `count` small values."""
    keys = [b"small:%04d" % number for number in range(count)]
    for number, key in enumerate(keys):
        assert tiers.store.put(key, content(number, SMALL_BYTES))
        if run:
            tiers.io.run()
    return keys


def test_small_values_are_written_ahead_and_come_back(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=16 * 1024 * 1024) as tiers:
        keys = small(tiers, 2 * tiers.store.inline_bytes_high // SMALL_BYTES)
        assert tiers.tier(keys[0]) == "disk"
        assert tiers.store.stats.evicted == tiers.tiering.stats.spill_dropped == 0
        assert tiers.store.inline_bytes <= tiers.store.inline_bytes_high
        for number in (0, 1, len(keys) // 2, len(keys) - 1):
            assert tiers.get(keys[number]) == content(number, SMALL_BYTES)
        assert len(tiers.store.index) == len(keys)


def test_small_values_may_go_a_quarter_over_their_bound_before_one_leaves_unwritten(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=16 * 1024 * 1024) as tiers:
        small(tiers, tiers.store.inline_bytes_high * 9 // 8 // SMALL_BYTES, run=False)
        assert tiers.store.inline_bytes > tiers.store.inline_bytes_high
        assert tiers.tiering.stats.spill_dropped == 0
        small(tiers, 2 * tiers.store.inline_bytes_high // SMALL_BYTES, run=False)
        assert tiers.tiering.stats.spill_dropped > 0
        assert tiers.store.inline_bytes <= tiers.store.inline_bytes_high * 5 / 4 + SMALL_BYTES


def test_small_values_that_come_back_push_none_out_that_is_not_on_disk(tmp_path: Path) -> None:
    with TieredStore(tmp_path, disk_bytes=16 * 1024 * 1024) as tiers:
        high = tiers.store.inline_bytes_high
        away = small(tiers, high * 3 // 5 // SMALL_BYTES)
        assert tiers.save()
        for key in away:
            tiers.store._unload(tiers.store.index.spaces[0][key])
        dirty = [b"dirty:%d" % number for number in range(high * 4 // 5 // SMALL_BYTES)]
        for key in dirty:
            assert tiers.store.put(key, content(1, SMALL_BYTES))
        assert all(tiers.get(key) is not None for key in away)
        assert tiers.tiering.stats.spill_dropped == 0
        assert all(tiers.get(key) == content(1, SMALL_BYTES) for key in dirty)
        assert tiers.store.inline_bytes <= high


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_a_small_value_survives_being_away(length: int, tiers: TieredStore) -> None:
    assert tiers.store.put(b"s", content(3, length))
    assert tiers.save()
    tiers.store._unload(tiers.store.index.spaces[0][b"s"])
    assert tiers.store.fetch(b"s") is None
    assert tiers.get(b"s") == content(3, length)


def test_a_small_value_that_is_written_over_in_place_is_not_clean(tiers: TieredStore) -> None:
    assert tiers.store.put(b"s", b"one")
    assert tiers.store.put(b"s", b"two")
    assert tiers.save()
    assert tiers.store.put(b"s", b"three")
    assert len(tiers.store.unsaved) == 1
    assert tiers.save()
    tiers.store._unload(tiers.store.index.spaces[0][b"s"])
    assert tiers.get(b"s") == b"three"


def test_a_small_value_that_is_written_over_while_it_is_written_out_stays_dirty(tiers: TieredStore) -> None:
    assert tiers.store.put(b"s", b"old")
    tiers.during("pwrite", lambda: tiers.store.put(b"s", b"new"))
    tiers.save()
    assert len(tiers.store.unsaved) == 1
    assert tiers.save()
    tiers.store._unload(tiers.store.index.spaces[0][b"s"])
    assert tiers.get(b"s") == b"new"


def test_a_value_that_was_received_shorter_than_announced_comes_back_as_it_is(tiers: TieredStore) -> None:
    for key, length in ((b"a", 100), (b"b", 20_000)):
        room = tiers.store.reserve(key, BLOCK_BYTES)
        assert room is not None
        room.view[:length] = content(5, length)
        room.shorten(length)
        room.commit()
    assert tiers.save()
    tiers.push_out()
    assert (tiers.tier(b"a"), tiers.tier(b"b")) == ("disk", "disk")
    assert tiers.get(b"a") == content(5, 100)
    assert tiers.get(b"b") == content(5, 20_000)


@pytest.mark.parametrize("disk_mib", [1, 4])
def test_a_disk_smaller_than_memory_is_not_written_over_and_over(tmp_path: Path, disk_mib: int) -> None:
    with TieredStore(tmp_path, disk_bytes=disk_mib * MIB, arena_bytes=16 * MIB) as tiers:
        stored = 40 * BLOCKS
        for number in range(stored):
            tiers.put(b"key:%d" % number)
            tiers.io.run()
        assert stored // 2 < tiers.tiering.stats.spilled <= stored
        assert tiers.tiering.stats.spill_dropped == 0


# The order in which blocks leave memory, and what of them is worth a write, under each policy; and an arena that is
# only staging.


def leave(tiers: TieredStore, count: int) -> None:
    """Make room for `count` more blocks than there is, as a client does that waits for the disk."""
    for number in range(count):
        key = b"new:%d" % number
        while (room := tiers.store.reserve(key, len(content(0)), drop=False)) is None:
            assert tiers.io.run()
        room.view[:] = content(number)
        room.commit()
        tiers.io.run()


def away(tiers: TieredStore, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if tiers.tier(key) == "disk"]


@pytest.mark.parametrize("policy", ["LRU", "LFU", "FIFO", "MRU", "S3FIFO"])
def test_under_every_policy_all_that_was_used_twice_survives_a_memory_that_is_too_small(
    tmp_path: Path, policy: str
) -> None:
    with TieredStore(tmp_path, policy=policy) as tiers:
        keys = fill(tiers.store)
        for _ in range(2):
            assert all(read(tiers.store, key) is not None for key in keys)
        leave(tiers, 10)
        assert present(tiers.store, keys) == keys
        assert [tiers.get(key) for key in keys] == [content(number) for number in range(BLOCKS)]


@pytest.mark.parametrize(
    ("policy", "first", "first_used"),
    [("LRU", b"fill:0", b"fill:1"), ("FIFO", b"fill:0", b"fill:0"), ("LFU", b"fill:0", b"fill:1")],
)
def test_the_policy_says_which_entry_leaves_memory_first(
    tmp_path: Path, policy: str, first: bytes, first_used: bytes
) -> None:
    with TieredStore(tmp_path / "a", policy=policy) as tiers:
        keys = fill(tiers.store)
        leave(tiers, 1)
        assert away(tiers, keys) == [first]
    with TieredStore(tmp_path / "b", policy=policy) as tiers:
        keys = fill(tiers.store)
        assert read(tiers.store, b"fill:0") is not None
        leave(tiers, 1)
        assert away(tiers, keys) == [first_used]


def test_under_mru_what_was_used_last_goes_to_disk_first(tmp_path: Path) -> None:
    with TieredStore(tmp_path, policy="MRU") as tiers:
        keys = fill(tiers.store)
        assert read(tiers.store, b"fill:5") is not None
        leave(tiers, 1)
        assert away(tiers, keys) == [b"fill:5"]
        assert tiers.get(b"fill:5") == content(5)


def test_under_s3fifo_what_was_never_used_leaves_unwritten_and_is_not_missed(tmp_path: Path) -> None:
    with TieredStore(tmp_path, policy="S3FIFO") as tiers:
        keys = fill(tiers.store)
        tiers.put(b"new")
        tiers.io.run()
        assert tiers.tier(keys[0]) is None
        assert tiers.steps("pwrite") == 0
        assert tiers.store.stats.evicted == 1
        assert tiers.tiering.stats.spill_dropped == 0


def test_under_s3fifo_what_was_used_is_written_before_it_leaves(tmp_path: Path) -> None:
    with TieredStore(tmp_path, policy="S3FIFO") as tiers:
        keys = fill(tiers.store)
        assert all(read(tiers.store, key) is not None for key in keys)
        leave(tiers, 3)
        assert present(tiers.store, keys) == keys
        assert len(away(tiers, keys)) > 0


def test_a_block_that_came_back_is_the_one_used_last(tiers: TieredStore) -> None:
    tiers.put_away(b"old")
    keys = fill(tiers.store)
    assert tiers.get(b"old") == tiers.content(b"old")
    leave(tiers, BLOCKS - 2)
    assert tiers.tier(b"old") == "memory"
    assert present(tiers.store, keys) == keys


def test_a_block_that_leaves_memory_is_the_hottest_on_disk(tiers: TieredStore) -> None:
    keys = fill(tiers.store)
    assert tiers.save()
    assert read(tiers.store, keys[0]) is not None
    leave(tiers, BLOCKS)
    assert [key for key in tiers.on_disk() if key in keys] == [*keys[1:], keys[0]]


# ---- keep=False --------------------------------------------------------------------------------------------------
def test_an_arena_of_passage_is_empty_once_what_was_stored_is_on_disk(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        assert tiers.store.put(b"small", b"value")
        assert tiers.tier(b"a") == tiers.tier(b"small") == "memory", "readable at once"
        tiers.io.run()
        assert tiers.tier(b"a") == tiers.tier(b"small") == "disk"
        assert tiers.store.used_bytes == 0


def test_a_block_that_is_read_passes_through_and_leaves_with_its_last_reader(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        tiers.io.run()
        first, second = tiers.bring((b"a", 0)), tiers.bring((b"a", 0))
        assert first is not None
        assert second is not None
        tiers.io.run()
        lease = tiers.store.lease(b"a")
        assert lease is not None
        first.release()
        second.release()
        assert tiers.tier(b"a") == "memory"
        assert lease.view == tiers.content(b"a")
        lease.release()
        assert tiers.tier(b"a") == "disk"
        assert (tiers.steps("pread"), tiers.steps("pwrite")) == (1, 1)


def test_a_block_under_way_for_which_no_caller_waits_any_more_leaves_as_it_comes(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        tiers.io.run()
        waiting = tiers.bring((b"a", 0))
        assert waiting is not None
        tiers.during("pread", waiting.release)
        tiers.io.run()
        assert tiers.tier(b"a") == "disk"
        assert tiers.store.used_bytes == 0


def test_a_caller_that_asks_for_a_block_after_another_gave_it_up_under_way_holds_it(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        tiers.io.run()
        first, others = tiers.bring((b"a", 0)), list[Bringing | None]()
        assert first is not None

        def change_hands() -> None:
            first.release()
            others.append(tiers.bring((b"a", 0)))

        tiers.during("pread", change_hands)
        tiers.io.run()
        assert tiers.tier(b"a") == "memory"
        assert others[0] is not None
        others[0].release()
        assert tiers.tier(b"a") == "disk"
        assert tiers.steps("pread") == 1


def test_a_block_that_two_have_given_up_before_it_was_begun_is_not_read(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        tiers.io.run()
        waits = [tiers.bring((b"a", 0)), tiers.bring((b"a", 0))]
        for waiting in waits:
            assert waiting is not None
            waiting.release()
        tiers.io.run()
        assert tiers.tier(b"a") == "disk"
        assert tiers.steps("pread") == 0


def test_a_block_that_is_still_read_when_it_is_on_disk_leaves_with_its_reader(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        lease = tiers.store.lease(b"a")
        tiers.io.run()
        assert tiers.tier(b"a") == "memory"
        assert lease is not None
        lease.release()
        assert tiers.tier(b"a") == "disk"


def test_a_block_that_was_prefetched_waits_in_memory_for_its_reader(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        tiers.io.run()
        job = tiers.tiering.prefetch([b"a"])
        tiers.io.run()
        assert job is not None
        assert job.counts.done == 1
        assert tiers.tier(b"a") == "memory"
        assert read(tiers.store, b"a") == tiers.content(b"a")
        assert tiers.tier(b"a") == "disk"


def test_what_waits_for_a_block_right_as_it_leaves_gets_it(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        seen: list[bytes | None] = []

        def ask() -> None:  # the block has left, and the thread that wrote it has not ended its job yet
            assert tiers.tier(b"a") == "disk"
            tiers.tiering.bring([(b"a", 0)], lambda bringing: seen.append(read(tiers.store, b"a")))

        tiers.tiering.call_on_room(ask)
        tiers.io.run()
        assert seen == [tiers.content(b"a")]
        assert tiers.store.leases == 1


def test_an_arena_of_passage_that_fills_faster_than_the_disk_writes_refuses_callers_that_can_wait(
    tmp_path: Path,
) -> None:
    with TieredStore(tmp_path, keep=False, disk_bytes=8 * MIB) as tiers:
        for number in range(4 * BLOCKS):
            key = b"n:%03d" % number
            while (room := tiers.store.reserve(key, len(content(0)), drop=False)) is None:
                assert tiers.io.run(1)
            room.view[:] = tiers.content(key)
            room.commit()
        tiers.io.run()
        assert tiers.store.stats.evicted == 0
        assert tiers.store.away == 4 * BLOCKS


def test_a_block_that_another_thread_begins_to_write_while_the_rest_is_published_stays_its_own(
    tiers: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.put(b"a", b"b")
    first, second = (tiers.store.index.spaces[0][key] for key in (b"a", b"b"))
    io, writing, may_end = tiers.tiering.disk_io, threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: io.write_out([first]))

    def hold() -> None:
        writing.set()
        may_end.wait(60)

    def pause(_: float) -> None:
        """Between the two: the first is to be written again, and the other thread is at it."""
        with tiers.store.lock:
            tiers.disk.forget(b"a", 0)
            io.let_go(first)
        tiers.during("pwrite", hold)
        other.start()
        assert writing.wait(60)

    monkeypatch.setattr(disk_io, "PUBLISHED_AT_ONCE", 1)
    monkeypatch.setattr(disk_io, "time", SimpleNamespace(sleep=pause))
    try:
        assert io.write_out([first, second]) == [False, True]
        assert (first.leases, tiers.tiering.stats.spill_failed) == (1, 0), "the other thread's, which has not failed"
    finally:
        may_end.set()
        other.join(60)
    assert sorted(tiers.on_disk()) == [b"a", b"b"]
