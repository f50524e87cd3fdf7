"""The order in which blocks leave memory, and what of them is worth a write, under each policy; and an arena that is
only a place of passage."""

from pathlib import Path

import pytest

from kvredis.storage.tiering.manager import Bringing
from tests.storage.small_store import BLOCKS, content, fill, present, read
from tests.storage.tiered_store import MIB, TieredStore


def leave(tiers: TieredStore, count: int) -> None:
    """Make room for `count` more blocks than there is, as somebody does who waits for the disk."""
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
def test_who_leaves_memory_first_is_who_the_policy_says(
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


def test_a_block_that_came_back_is_the_one_used_last(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put_away(b"old")
        keys = fill(tiers.store)
        assert tiers.get(b"old") == tiers.content(b"old")
        leave(tiers, BLOCKS - 2)
        assert tiers.tier(b"old") == "memory"
        assert present(tiers.store, keys) == keys


def test_a_block_that_leaves_memory_is_the_hottest_on_disk(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
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


def test_a_block_under_way_that_nobody_waits_for_any_more_leaves_as_it_comes(tmp_path: Path) -> None:
    with TieredStore(tmp_path, keep=False) as tiers:
        tiers.put(b"a")
        tiers.io.run()
        waiting = tiers.bring((b"a", 0))
        assert waiting is not None
        tiers.during("pread", waiting.release)
        tiers.io.run()
        assert tiers.tier(b"a") == "disk"
        assert tiers.store.used_bytes == 0


def test_who_asks_for_a_block_after_another_gave_it_up_under_way_holds_it(tmp_path: Path) -> None:
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


def test_an_arena_of_passage_that_fills_faster_than_the_disk_writes_refuses_who_can_wait(tmp_path: Path) -> None:
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
