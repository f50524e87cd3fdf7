"""A prefetch job: its counts add up, it is finished when nothing of it moves, and it takes back only what is its."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvredis.storage.background import IoThreads, Priority
from kvredis.storage.tiering.prefetch import PrefetchBounds, PrefetchCounts, PrefetchJob, PrefetchJobs
from kvredis.storage.tiering.transfers import Kind, State, Transfer, Transfers
from tests.storage.fake_files import Fault, on
from tests.storage.small_store import BLOCK_BYTES, BLOCKS, content, fill, read
from tests.storage.tiered_store import TieredStore

from .fake_io import ManualIo

LONG_S = 60.0


class Desk:
    """Where jobs are opened, over a ManualIo; keys are single letters, here and on disk until they are `resident`."""

    def __init__(self, queue_jobs_max: int = 100, bounds: PrefetchBounds | None = None) -> None:
        self.io = ManualIo(queue_jobs_max)
        self.transfers: Transfers[bytes] = Transfers(self.io)
        self.jobs = PrefetchJobs(self.begin, bounds or PrefetchBounds(jobs_max=3), clock_s=self.io.clock.seconds)
        self.resident: set[bytes] = set()
        self.deleted: set[bytes] = set()
        self.begun: list[bytes] = []
        self.told: list[int] = []
        self.on_read: Callable[[], object] = bool

    def begin(
        self, kind: Kind, key: bytes, space: int, done: Callable[[Transfer[bytes]], None]
    ) -> Transfer[bytes] | State:
        """As a store would."""
        self.begun.append(key)
        if key in self.resident:
            return State.DONE
        if key in self.deleted:
            return State.CANCELLED
        return self.ask(kind, key, done)

    def ask(self, kind: Kind, key: bytes, done: Callable[[Transfer[bytes]], None] | None = None) -> Transfer[bytes]:
        """Have a key brought into memory."""

        def read() -> bytes:
            self.on_read()
            self.resident.add(key)
            return key

        return self.transfers.join_or_start(kind, key, 0, lambda: self.io.submit(kind.priority, 1, read), done)

    def open(self, keys: str = "", deadline_s: float | None = None) -> PrefetchJob[bytes]:
        """A job that fetches these keys, under way."""
        job = self.jobs.open(deadline_s)
        assert job is not None
        job.fetch([key.encode() for key in keys], 0)
        job.seal()
        return job

    def tell(self, job: PrefetchJob[bytes]) -> None:
        """A callback."""
        assert job.is_finished
        self.told.append(job.number)


def test_a_job_counts_what_becomes_of_its_blocks() -> None:
    desk = Desk()
    job = desk.jobs.open()
    assert job is not None
    job.count(resident=2, missing=1)
    job.count(no_room=1)
    job.fetch([b"a", b"b", b"c", b"d"], 0)
    assert (job.counts, desk.begun) == (PrefetchCounts(queued=4, resident=2, missing=1, no_room=1), [])
    desk.deleted.add(b"d")
    job.seal()
    desk.io.fail_next(OSError("EIO"))
    desk.io.run(2)
    assert job.counts == PrefetchCounts(queued=4, resident=2, missing=1, no_room=1, done=1, failed=1, dropped=1)
    assert (job.counts.pending, job.is_finished) == (1, False)
    desk.io.run()
    assert (job.counts.done, job.counts.pending, job.is_finished) == (2, 0, True)


def test_only_a_few_blocks_of_a_job_are_moving_at_a_time_in_the_order_of_the_list() -> None:
    desk = Desk(bounds=PrefetchBounds(moving_max=2))
    job, most = desk.open("abcdefg"), 0
    assert desk.begun == [b"a", b"b"]
    while desk.io.run(1):
        most = max(most, len(desk.transfers))
    assert (most, desk.begun) == (2, [b"a", b"b", b"c", b"d", b"e", b"f", b"g"])
    assert (job.counts.done, job.is_finished) == (7, True)


def test_a_demand_overtakes_the_list_and_the_job_finds_the_block_in_memory() -> None:
    desk = Desk(bounds=PrefetchBounds(moving_max=1))
    job = desk.open("abc")
    desk.ask(Kind.PROMOTE, b"c")
    desk.io.run(1)
    assert desk.resident == {b"c"}
    assert desk.io.run() == 2
    assert (job.counts.done, job.is_finished) == (3, True)


def test_a_list_of_blocks_that_need_no_disk_is_done_at_once_however_long() -> None:
    desk = Desk()
    desk.resident.add(b"a")
    assert desk.open("a" * 5000).counts == PrefetchCounts(queued=5000, done=5000)


def test_a_list_without_any_room_has_none_and_ends() -> None:
    desk = Desk(queue_jobs_max=0)
    job = desk.open("a" * 5000)
    assert job.counts == PrefetchCounts(no_room=5000)
    assert (job.is_finished, len(desk.begun)) == (True, 1)


def test_a_job_that_is_refused_tries_again_when_one_of_its_own_has_arrived() -> None:
    desk = Desk(queue_jobs_max=2)
    job = desk.open("abcdef")
    assert desk.begun == [b"a", b"b", b"c"]
    desk.io.run()
    assert job.counts == PrefetchCounts(queued=6, done=6)
    assert job.is_finished


def test_a_refusal_that_the_last_arrival_has_overtaken_is_no_reason_to_give_up() -> None:
    desk = Desk()

    def begin(kind: Kind, key: bytes, space: int, done: Callable[[Transfer[bytes]], None]) -> Transfer[bytes] | State:
        if key == b"b" and desk.io.run():  # `a` arrives between the refusal of `b` and our hearing of it
            return State.REFUSED
        return desk.begin(kind, key, space, done)

    job = PrefetchJobs(begin).open()
    assert job is not None
    job.fetch([b"a", b"b"], 0)
    job.seal()
    assert desk.begun == [b"a", b"b"]
    desk.io.run()
    assert (job.counts, job.is_finished) == (PrefetchCounts(queued=2, done=2), True)


def test_what_exceeds_a_jobs_list_has_no_room() -> None:
    desk = Desk(bounds=PrefetchBounds(blocks_max=3))
    job = desk.open("abcde")
    assert (job.counts.queued, job.counts.no_room) == (3, 2)


def test_beginning_a_long_list_costs_the_begin_of_a_few_though_the_disk_is_quick() -> None:
    desk = Desk(bounds=PrefetchBounds(moving_max=3))

    def begin(kind: Kind, key: bytes, space: int, done: Callable[[Transfer[bytes]], None]) -> Transfer[bytes] | State:
        transfer = desk.begin(kind, key, space, done)
        if len(desk.begun) > 1:
            desk.io.run(1)  # one arrives for each that is begun, as with threads
        return transfer

    job = PrefetchJobs(begin, desk.jobs.bounds).open()
    assert job is not None
    job.fetch([b"%d" % number for number in range(1000)], 0)
    job.seal()
    assert len(desk.begun) == 3
    desk.io.run()
    assert job.counts.done == 1000


def test_a_caller_that_waits_is_told_once_when_all_has_arrived() -> None:
    desk = Desk()
    job = desk.open("ab")
    job.add_done(desk.tell)
    desk.io.run(1)
    assert desk.told == []
    desk.io.run()
    assert desk.told == [job.number]
    job.add_done(desk.tell)
    assert desk.told == [job.number] * 2, "who asks after the end is told at once"
    job.seal()
    assert len(desk.told) == 2


def test_a_job_is_not_finished_before_it_is_sealed() -> None:
    desk = Desk()
    job = desk.jobs.open()
    assert job is not None
    job.add_done(desk.tell)
    job.count(resident=1)
    assert not job.is_finished
    job.seal()
    assert desk.told == [job.number]


def test_a_job_of_nothing_to_do_is_finished_at_once() -> None:
    desk = Desk()
    job = desk.open()
    job.add_done(desk.tell)
    assert desk.told == [job.number]
    assert job.cancel() == 0
    assert not job.is_cancelled


def test_a_caller_that_has_waited_long_enough_is_not_told() -> None:
    desk = Desk()
    job = desk.open("a")
    job.add_done(desk.tell)
    assert job.remove_done(desk.tell)
    assert not job.remove_done(desk.tell)
    desk.io.run()
    assert desk.told == []


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_callback_that_fails_does_not_keep_the_others_from_theirs(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(job: PrefetchJob[bytes]) -> None:
        raise error

    desk = Desk()
    job = desk.open("a")
    job.add_done(fail)
    job.add_done(desk.tell)
    desk.io.run()
    assert desk.told == [job.number]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_block_that_cannot_be_begun_has_failed_and_the_rest_of_its_job_comes(
    error: type[BaseException], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(bounds=PrefetchBounds(moving_max=1))
    read_in = desk.ask

    def ask(kind: Kind, key: bytes, done: Callable[[Transfer[bytes]], None] | None = None) -> Transfer[bytes]:
        if key == b"b":
            raise error
        return read_in(kind, key, done)

    monkeypatch.setattr(desk, "ask", ask)
    job = desk.open("abc")
    job.add_done(desk.tell)
    desk.io.run()
    assert (job.counts.done, job.counts.failed) == (2, 1)
    assert desk.told == [job.number]
    assert caplog.messages == [f"prefetch job {job.number} could not begin a block"]


def test_cancelling_drops_what_has_not_begun_and_tells_those_that_wait() -> None:
    desk = Desk()
    job = desk.open("abc")
    job.add_done(desk.tell)
    desk.io.run(1)
    assert job.cancel() == 2
    assert job.counts == PrefetchCounts(queued=3, done=1, dropped=2)
    assert (desk.told, job.is_cancelled) == ([job.number], True)
    assert (desk.io.run(), job.cancel()) == (0, 0)


def test_cancelling_drops_the_list_too() -> None:
    desk = Desk(bounds=PrefetchBounds(moving_max=2))
    job = desk.open("abcdef")
    desk.io.run(1)
    assert job.cancel() == 5
    assert job.counts == PrefetchCounts(queued=6, done=1, dropped=5)
    assert (desk.io.run(), desk.begun) == (0, [b"a", b"b", b"c"])


def test_cancelling_lets_what_is_under_way_come_to_its_end() -> None:
    desk, answers = Desk(), list[object]()
    job = desk.open("ab")
    desk.on_read = lambda: answers.extend((job.cancel(), job.is_finished, job.counts.pending))
    desk.io.run()
    assert answers == [1, False, 1]
    assert job.counts == PrefetchCounts(queued=2, done=1, dropped=1)
    assert job.is_finished


def test_a_block_for_which_another_caller_waits_comes_all_the_same() -> None:
    desk = Desk()
    first, second = desk.open("ab"), desk.open("bc")
    heard: list[State] = []
    desk.ask(Kind.PROMOTE, b"a", lambda transfer: heard.append(transfer.state))
    assert first.cancel() == 2
    assert first.is_finished
    assert desk.io.run() == 3
    assert (heard, second.counts.done) == ([State.DONE], 2)


def test_a_key_that_is_named_twice_is_fetched_once_and_counted_twice() -> None:
    desk = Desk()
    job = desk.open("aa")
    assert (desk.io.run(), job.counts.done, job.is_finished) == (1, 2, True)
    job = desk.open("bb")
    assert (job.cancel(), job.is_finished, desk.io.run()) == (2, True, 0)


def test_a_cancelled_job_fetches_nothing_more() -> None:
    desk = Desk()
    job = desk.jobs.open()
    assert job is not None
    job.cancel()
    job.fetch([b"a"], 0)
    job.seal()
    assert job.is_finished
    assert (job.counts.dropped, desk.io.run(), desk.begun) == (1, 0, [])


def test_a_job_past_its_deadline_is_cancelled() -> None:
    desk = Desk()
    now_s = desk.io.clock.now_s
    early, late, never = desk.open("a", now_s + 1), desk.open("bc", now_s + 2), desk.open("d")
    assert desk.jobs.cancel_overdue() == 0
    desk.io.clock.now_s += 2
    desk.io.run(1)
    assert desk.jobs.cancel_overdue() == 2
    assert (early.counts.done, early.is_cancelled) == (1, False)
    assert (late.counts.dropped, late.is_finished) == (2, True)
    assert not never.is_finished


def test_jobs_are_found_by_number_and_the_oldest_finished_one_makes_room_for_another() -> None:
    desk = Desk(bounds=PrefetchBounds(jobs_max=2))
    moving, finished = desk.open("a"), desk.open()
    assert desk.jobs.get(finished.number) is finished
    third = desk.open("b")
    assert (desk.jobs.get(finished.number), desk.jobs.get(99)) == (None, None)
    assert [desk.jobs.get(job.number) for job in (moving, third)] == [moving, third]
    assert desk.jobs.open() is None, "both are on their way"
    desk.io.run()
    assert desk.open().number == third.number + 1
    assert len(desk.jobs) == 2


def test_with_threads_every_block_is_settled_once_and_the_job_is_told_of_once() -> None:
    io = IoThreads(3, 6, 1000)
    transfers: Transfers[bytes] = Transfers(io)
    finished = threading.Semaphore(0)

    def begin(kind: Kind, key: bytes, space: int, done: Callable[[Transfer[bytes]], None]) -> Transfer[bytes] | State:
        return transfers.join_or_start(
            Kind.PREFETCH, key, space, lambda: io.submit(Priority.PREFETCH, 1, lambda: key), done
        )

    jobs = PrefetchJobs(begin, PrefetchBounds(moving_max=4))
    io.start()
    opened = []
    for number in range(12):
        job = jobs.open()
        assert job is not None
        job.fetch([b"%d" % (key * (number + 1) % 97) for key in range(300)], 0)
        job.add_done(lambda job: finished.release())
        job.seal()
        opened.append(job)
        if number % 4 == 3:
            job.cancel()
    for _ in opened:
        assert finished.acquire(timeout=LONG_S)
    assert io.drain(LONG_S)
    assert io.close(LONG_S)
    assert not finished.acquire(blocking=False)
    for job in opened:
        counts = job.counts
        assert counts.queued + counts.no_room == 300
        assert counts.pending == 0
        assert counts.failed == 0
        assert job.is_cancelled or counts.dropped == 0
    assert sum(job.counts.done for job in opened) > 0
    assert len(transfers) == 0


# Blocks brought in ahead of need: what is counted, what has room, and what may interrupt it.


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


def test_a_prefetch_answers_at_once_what_it_found(tiers: TieredStore) -> None:
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


def test_a_prefetch_of_what_is_here_is_finished_at_once(tiers: TieredStore) -> None:
    tiers.put(b"here")
    assert prefetch(tiers, b"here", b"nowhere").is_finished
    assert prefetch(tiers).is_finished


def test_a_prefetch_counts_no_use_and_no_hit(tiers: TieredStore) -> None:
    tiers.put_away(b"a")
    prefetch(tiers, b"a", b"nowhere")
    tiers.io.run()
    assert tiers.store.stats.hits == tiers.store.stats.misses == 0


def test_what_memory_cannot_hold_at_one_time_has_no_room(tiers: TieredStore) -> None:
    keys = away(tiers, BLOCKS + 5)
    tiers.put(b"here")
    job = prefetch(tiers, b"here", *keys)
    tiers.io.run()
    assert (job.counts.resident, job.counts.done, job.counts.no_room) == (1, BLOCKS - 1, 6)
    assert [tiers.tier(key) for key in (b"here", *keys)] == ["memory"] * BLOCKS + ["disk"] * 6


def test_two_prefetches_share_the_room_and_give_it_back_in_the_end(tiers: TieredStore) -> None:
    keys = away(tiers, BLOCKS + 4)
    first = prefetch(tiers, *keys[:BLOCKS])
    second = prefetch(tiers, *keys[BLOCKS:])
    assert (first.counts.no_room, second.counts.no_room) == (0, 4)
    first.cancel()
    tiers.io.run()
    assert prefetch(tiers, *keys[BLOCKS:]).counts.no_room == 0
    tiers.io.run()
    assert tiers.tiering._listed_bytes == 0


def test_what_readers_and_writers_hold_is_no_room_for_a_prefetch(tiers: TieredStore) -> None:
    keys = away(tiers, BLOCKS)
    with tiers.store.reserve(b"writer", 4 * BLOCK_BYTES) or pytest.fail("no room"):
        job = prefetch(tiers, *keys)
        tiers.io.run()
    assert job.counts.no_room >= 4
    assert job.counts.done == BLOCKS - job.counts.no_room > 0


def test_a_prefetch_that_finds_memory_held_by_readers_gives_up_its_list(tiers: TieredStore) -> None:
    keys = away(tiers, 4)
    leases = [tiers.store.lease(key) for key in fill(tiers.store)]
    job = prefetch(tiers, *keys)
    tiers.io.run()
    assert job.is_finished
    assert (job.counts.done, job.counts.no_room) == (0, 4)
    for lease in leases:
        assert lease is not None
        lease.release()


def test_after_a_prefetch_the_tail_is_the_first_to_leave(tiers: TieredStore) -> None:
    keys = away(tiers, 6)
    tiers.put(b"x")
    prefetch(tiers, *keys)
    tiers.io.run()
    assert [entry.key for entry in tiers.store.policy.victims()] == [b"x", *reversed(keys)]


def test_what_is_here_already_is_touched_at_once_head_hottest(tiers: TieredStore) -> None:
    tiers.put(b"a", b"b", b"c", b"d")
    prefetch(tiers, b"a", b"b", b"c")
    assert [entry.key for entry in tiers.store.policy.victims()] == [b"d", b"c", b"b", b"a"]


def test_the_tick_ends_a_prefetch_whose_deadline_has_passed(tiers: TieredStore) -> None:
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
def test_a_prefetch_is_as_urgent_as_its_kind(kind: Kind, priority: Priority, tiers: TieredStore) -> None:
    keys = away(tiers, 2)
    queued = tiers.io.figures()[priority].submitted
    prefetch(tiers, *keys, kind=kind)
    assert tiers.io.figures()[priority].submitted == queued + 2


def test_a_demand_overtakes_a_prefetch(tiers: TieredStore) -> None:
    keys = away(tiers, 4)
    prefetch(tiers, *keys[:3])
    bringing = tiers.bring((keys[3], 0))
    tiers.io.run(1)
    assert [tiers.tier(key) for key in keys] == ["disk"] * 3 + ["memory"]
    assert bringing is not None
    bringing.release()


def test_a_block_that_is_deleted_or_damaged_in_between_is_no_block_that_came(tiers: TieredStore) -> None:
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


def test_small_values_are_prefetched_too(tiers: TieredStore) -> None:
    assert tiers.store.put(b"s", content(1, 1000))
    assert tiers.save()
    tiers.store._unload(tiers.store.index.spaces[0][b"s"])
    job = prefetch(tiers, b"s")
    tiers.io.run()
    assert job.counts.done == 1
    assert tiers.store.fetch(b"s") == content(1, 1000)
