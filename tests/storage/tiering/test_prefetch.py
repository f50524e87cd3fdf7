"""A prefetch job: its counts add up, it is finished when nothing of it moves, and it takes back only what is its."""

import logging
import threading
from collections.abc import Callable

import pytest

from kvredis.storage.background import IoThreads, Priority
from kvredis.storage.tiering.prefetch import PrefetchBounds, PrefetchCounts, PrefetchJob, PrefetchJobs
from kvredis.storage.tiering.transfers import Kind, State, Transfer, Transfers

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


def test_whoever_waits_is_told_once_when_all_has_arrived() -> None:
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


def test_who_has_waited_long_enough_is_not_told() -> None:
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


def test_cancelling_drops_what_has_not_begun_and_tells_those_who_wait() -> None:
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


def test_a_block_that_somebody_else_waits_for_comes_all_the_same() -> None:
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
