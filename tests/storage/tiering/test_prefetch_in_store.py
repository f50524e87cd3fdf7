"""Blocks brought in ahead of need: what is counted, what has room, and what may interrupt it."""

from pathlib import Path

import pytest

from kvredis.storage.background import Priority
from kvredis.storage.tiering.prefetch import PrefetchJob
from kvredis.storage.tiering.transfers import Kind
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import BLOCK_BYTES, BLOCKS, content, fill, read
from tests.storage.tiered_store import TieredStore


def prefetch(
    tiers: TieredStore, *keys: bytes, kind: Kind = Kind.PREFETCH, deadline_s: float | None = None
) -> PrefetchJob[None]:
    job = tiers.tiering.prefetch(keys, kind=kind, deadline_s=deadline_s)
    assert job is not None
    return job


def away(tiers: TieredStore, count: int) -> list[bytes]:
    """Leave that many blocks on disk alone."""
    keys = [b"away:%02d" % number for number in range(count)]
    for key in keys:
        tiers.put(key)
        assert tiers.save()
    tiers.push_out()
    return keys


def test_a_prefetch_answers_at_once_what_it_found(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put_away(b"a", b"b")
        tiers.put(b"here")
        job = prefetch(tiers, b"a", b"b", b"here", b"nowhere")
        counts = job.counts
        assert (counts.queued, counts.resident, counts.missing, counts.no_room, counts.done) == (2, 1, 1, 0, 0)
        assert not job.is_finished
        assert tiers.io.run() == 2
        assert job.is_finished
        assert job.counts.done == 2
        assert [read(tiers.store, key) for key in (b"a", b"b")] == [tiers.content(b"a"), tiers.content(b"b")]


def test_a_prefetch_of_what_is_here_is_finished_at_once(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put(b"here")
        assert prefetch(tiers, b"here", b"nowhere").is_finished
        assert prefetch(tiers).is_finished


def test_a_prefetch_counts_no_use_and_no_hit(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put_away(b"a")
        prefetch(tiers, b"a", b"nowhere")
        tiers.io.run()
        assert tiers.store.stats.hits == tiers.store.stats.misses == 0


def test_what_memory_cannot_hold_at_one_time_has_no_room(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, BLOCKS + 5)
        tiers.put(b"here")
        job = prefetch(tiers, b"here", *keys)
        tiers.io.run()
        assert (job.counts.resident, job.counts.done, job.counts.no_room) == (1, BLOCKS - 1, 6)
        assert [tiers.tier(key) for key in (b"here", *keys)] == ["memory"] * BLOCKS + ["disk"] * 6


def test_two_prefetches_share_the_room_and_give_it_back_in_the_end(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, BLOCKS + 4)
        first = prefetch(tiers, *keys[:BLOCKS])
        second = prefetch(tiers, *keys[BLOCKS:])
        assert (first.counts.no_room, second.counts.no_room) == (0, 4)
        first.cancel()
        tiers.io.run()
        assert prefetch(tiers, *keys[BLOCKS:]).counts.no_room == 0
        tiers.io.run()
        assert tiers.tiering._listed_bytes == 0


def test_what_readers_and_writers_hold_is_no_room_for_a_prefetch(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, BLOCKS)
        with tiers.store.reserve(b"writer", 4 * BLOCK_BYTES) or pytest.fail("no room"):
            job = prefetch(tiers, *keys)
            tiers.io.run()
        assert job.counts.no_room >= 4
        assert job.counts.done == BLOCKS - job.counts.no_room > 0


def test_a_prefetch_that_finds_memory_held_by_readers_gives_up_its_list(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 4)
        leases = [tiers.store.lease(key) for key in fill(tiers.store)]
        job = prefetch(tiers, *keys)
        tiers.io.run()
        assert job.is_finished
        assert (job.counts.done, job.counts.no_room) == (0, 4)
        for lease in leases:
            assert lease is not None
            lease.release()


def test_after_a_prefetch_the_tail_is_the_first_to_leave(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 6)
        tiers.put(b"x")
        prefetch(tiers, *keys)
        tiers.io.run()
        assert [entry.key for entry in tiers.store.policy.victims()] == [b"x", *reversed(keys)]


def test_what_is_here_already_is_touched_at_once_head_hottest(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        tiers.put(b"a", b"b", b"c", b"d")
        prefetch(tiers, b"a", b"b", b"c")
        assert [entry.key for entry in tiers.store.policy.victims()] == [b"d", b"c", b"b", b"a"]


def test_a_cancelled_prefetch_reads_no_further(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 6)
        job = prefetch(tiers, *keys)
        tiers.io.run(2)
        assert job.cancel() == 4
        assert job.is_finished
        assert tiers.io.run() == 0
        assert (job.counts.done, job.counts.dropped) == (2, 4)
        assert [tiers.tier(key) for key in keys] == ["memory"] * 2 + ["disk"] * 4


def test_a_block_that_a_client_waits_for_comes_though_its_prefetch_is_cancelled(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 2)
        job = prefetch(tiers, *keys)
        bringing = tiers.bring((keys[1], 0))
        job.cancel()
        assert tiers.io.run() == 1
        assert tiers.tier(keys[1]) == "memory"
        assert bringing is not None
        bringing.release()


def test_the_tick_ends_a_prefetch_whose_deadline_has_passed(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 3)
        job = prefetch(tiers, *keys, deadline_s=tiers.clock.now_s + 1)
        tiers.tiering.tick()
        assert not job.is_cancelled
        tiers.clock.now_s += 2
        tiers.tiering.tick()
        assert job.is_cancelled
        assert job.counts.dropped == 3


@pytest.mark.parametrize(
    ("kind", "priority"),
    [(Kind.PROMOTE, Priority.DEMAND), (Kind.PREFETCH, Priority.PREFETCH), (Kind.IDLE, Priority.SPILL)],
)
def test_a_prefetch_is_as_urgent_as_its_kind(tmp_path: Path, kind: Kind, priority: Priority) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 2)
        queued = tiers.io.figures()[priority].submitted
        prefetch(tiers, *keys, kind=kind)
        assert tiers.io.figures()[priority].submitted == queued + 2


def test_a_demand_overtakes_a_prefetch(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 4)
        prefetch(tiers, *keys[:3])
        bringing = tiers.bring((keys[3], 0))
        tiers.io.run(1)
        assert [tiers.tier(key) for key in keys] == ["disk"] * 3 + ["memory"]
        assert bringing is not None
        bringing.release()


def test_a_block_that_is_deleted_or_damaged_in_between_is_no_block_that_came(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        keys = away(tiers, 40)
        job = prefetch(tiers, *keys[:2])
        tiers.files.plan = on("pread", Fault.EIO)
        tiers.io.run(1)
        tiers.files.plan = None
        tiers.io.run()
        assert (job.counts.failed, job.counts.done) == (1, 1)
        assert tiers.store.find(keys[0]) is None


def test_a_key_that_is_gone_when_its_turn_comes_is_dropped(tmp_path: Path) -> None:
    with TieredStore(tmp_path, arena_bytes=4 * 1024 * 1024, disk_bytes=8 * 1024 * 1024) as tiers:
        keys = away(tiers, 40)
        job = prefetch(tiers, *keys)
        assert tiers.store.delete(keys[-1:]) == 1
        tiers.io.run()
        assert (job.counts.queued, job.counts.done, job.counts.dropped) == (40, 39, 1)


def test_there_is_a_bound_on_jobs(tmp_path: Path) -> None:
    with TieredStore(tmp_path, arena_bytes=32 * 1024 * 1024) as tiers:
        (key,) = away(tiers, 1)
        jobs = [prefetch(tiers, key) for _ in range(tiers.tiering.jobs.bounds.jobs_max)]
        assert tiers.tiering.prefetch([key]) is None
        tiers.io.run()
        assert all(job.is_finished for job in jobs)
        assert tiers.tiering.prefetch([key]) is not None


def test_small_values_are_prefetched_too(tmp_path: Path) -> None:
    with TieredStore(tmp_path) as tiers:
        assert tiers.store.put(b"s", content(1, 1000))
        assert tiers.save()
        tiers.store._unload(tiers.store.index.spaces[0][b"s"])
        job = prefetch(tiers, b"s")
        tiers.io.run()
        assert job.counts.done == 1
        assert tiers.store.fetch(b"s") == content(1, 1000)
