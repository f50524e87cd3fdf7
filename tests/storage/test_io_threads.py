"""The disk's threads: who is begun first, what is refused, and that no job runs twice or is lost."""

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pytest

from kvredis.storage.background import IoThreads, JobOverdue, Priority

from .tiering.fake_io import ManualIo

DEMAND, PREFETCH, SPILL = Priority
LONG_S = 60.0


def nothing() -> None:
    """A job that does no work."""


def queue(io: IoThreads, priority: Priority, call: Callable[[], object] = nothing, nbytes: int = 1) -> Future[object]:
    """Submit what is expected to be admitted."""
    future = io.submit(priority, nbytes, call)
    assert future is not None
    return future


@contextmanager
def threads(count: int = 2, jobs_max: int = 100, bytes_max: int = 10_000) -> Iterator[IoThreads]:
    io = IoThreads(count, jobs_max, bytes_max)
    io.start()
    try:
        yield io
    finally:
        io.resume()
        assert io.close(LONG_S)
        io.check_integrity()


# ---- order -----------------------------------------------------------------------------------------------------------


def test_demands_go_before_prefetches_and_these_before_spills_each_in_the_order_they_came() -> None:
    io, ran = ManualIo(), list[str]()
    for name, priority in (("s1", SPILL), ("p1", PREFETCH), ("d1", DEMAND), ("s2", SPILL), ("d2", DEMAND)):
        queue(io, priority, lambda name=name: ran.append(name))  # type: ignore[misc]
    assert io.run() == 5
    assert ran == ["d1", "d2", "p1", "s1", "s2"]


def test_a_job_that_is_hastened_goes_behind_those_that_were_as_urgent_before() -> None:
    io, ran = ManualIo(), list[str]()
    queue(io, PREFETCH, lambda: ran.append("p1"))
    hastened = queue(io, PREFETCH, lambda: ran.append("p2"))
    queue(io, DEMAND, lambda: ran.append("d1"))
    assert io.hasten(hastened, DEMAND)
    io.check_integrity()
    queue(io, DEMAND, lambda: ran.append("d2"))
    io.run()
    assert ran == ["d1", "p2", "d2", "p1"]
    assert io.figures()[PREFETCH].hastened == 1


def test_a_job_is_never_made_less_urgent() -> None:
    io, ran = ManualIo(), list[str]()
    demand = queue(io, DEMAND, lambda: ran.append("d"))
    queue(io, PREFETCH, lambda: ran.append("p"))
    assert io.hasten(demand, SPILL)
    io.run()
    assert ran == ["d", "p"]
    assert not io.hasten(demand, DEMAND), "it is over"


def test_a_thread_takes_jobs_in_that_order_too() -> None:
    ran = list[int]()
    with threads(1) as io:
        io.pause()
        for number in range(30):
            queue(io, Priority(2 - number % 3), lambda number=number: ran.append(number))  # type: ignore[misc]
        assert ran == []
        assert not io.drain(0.0)
        io.resume()
        assert io.drain(LONG_S)
    assert ran == sorted(range(30), key=lambda number: (2 - number % 3, number))


def test_as_many_jobs_run_at_once_as_there_are_threads() -> None:
    together = threading.Barrier(3, timeout=LONG_S)
    with threads(3) as io:
        futures = [queue(io, SPILL, together.wait) for _ in range(3)]
        assert sorted(int(str(future.result(LONG_S))) for future in futures) == [0, 1, 2]


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_a_full_queue_is_an_answer() -> None:
    io = ManualIo(queue_jobs_max=2)
    queue(io, SPILL)
    queue(io, SPILL)
    assert io.submit(SPILL, 1, nothing) is None
    io.run(1)
    queue(io, SPILL)
    figures = io.figures()[SPILL]
    assert (figures.submitted, figures.refused, figures.queued) == (3, 1, 2)


def test_bytes_are_bounded_but_a_long_block_may_wait_alone() -> None:
    io = ManualIo(queue_bytes_max=100)
    queue(io, SPILL, nbytes=60)
    assert io.submit(SPILL, 41, nothing) is None
    queue(io, SPILL, nbytes=40)
    io.run()
    queue(io, SPILL, nbytes=5000)
    io.check_integrity()
    assert io.submit(SPILL, 1, nothing) is None
    assert io.run() == 1
    assert io.figures()[SPILL].done_bytes == 5100


def test_a_flood_of_spills_does_not_refuse_a_demand_nor_do_hastened_prefetches() -> None:
    io = ManualIo(queue_jobs_max=2)
    for _ in range(2):
        queue(io, SPILL)
        assert io.hasten(queue(io, PREFETCH), DEMAND)
    queue(io, DEMAND)
    queue(io, DEMAND)
    io.check_integrity()
    assert [io.submit(priority, 1, nothing) for priority in Priority] == [None] * 3


def test_what_is_under_way_takes_no_room_in_the_queue() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(LONG_S)

    with threads(1, jobs_max=1) as io:
        queue(io, SPILL, hold)
        assert begun.wait(LONG_S)
        queue(io, SPILL)
        assert io.submit(SPILL, 1, nothing) is None
        assert io.figures()[SPILL].running == 1
        go_on.set()


# ---- results, exceptions, holds --------------------------------------------------------------------------------------


def test_an_exception_goes_into_the_future_and_the_thread_goes_on() -> None:
    def fail(error: BaseException) -> None:
        raise error

    errors = [OSError("EIO"), SystemExit(1), KeyboardInterrupt()]
    with threads(1) as io:
        futures = [queue(io, DEMAND, lambda error=error: fail(error)) for error in errors]  # type: ignore[misc]
        assert queue(io, DEMAND, lambda: 7).result(LONG_S) == 7
        assert [future.exception(LONG_S) for future in futures] == errors
        assert (io.figures()[DEMAND].failed, io.figures()[DEMAND].done) == (3, 1)


def test_a_callback_that_ends_wildly_does_not_take_its_thread_along(caplog: pytest.LogCaptureFixture) -> None:
    def leave(future: Future[object]) -> None:
        raise SystemExit

    with threads(1) as io:
        io.pause()
        queue(io, DEMAND).add_done_callback(leave)
        io.resume()
        assert queue(io, DEMAND, lambda: 7).result(LONG_S) == 7
        assert io.drain(LONG_S)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_figures_are_right_for_whoever_was_woken_by_a_result() -> None:
    with threads(1) as io:
        for count in range(1, 50):
            queue(io, DEMAND, nbytes=3).result(LONG_S)
            figures = io.figures()[DEMAND]
            assert (figures.done, figures.done_bytes, figures.running) == (count, 3 * count, 0)


def test_waiting_times_are_from_submission_to_begin() -> None:
    io = ManualIo()
    for _ in range(2):
        queue(io, SPILL)
        io.clock.now_s += 2
    io.run()
    figures = io.figures()[SPILL]
    assert (figures.wait_s_total, figures.wait_s_max) == (6, 4)


class Hold:
    """What a job's closure may hold: a lease, a view."""


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_that_rests_holds_nothing_of_its_last_job(fails: bool) -> None:
    hold = Hold()
    gone = threading.Event()
    weakref.finalize(hold, gone.set)

    def job(held: Hold = hold) -> Hold:
        if fails:
            raise OSError("EIO")
        return held

    gc.disable()  # references alone must end it: a lease does not wait for the collector
    try:
        with threads(1) as io:
            future = queue(io, SPILL, job)
            wait([future], LONG_S)
            assert io.drain(LONG_S)
            del job, hold, future
            assert gone.wait(LONG_S)
    finally:
        gc.enable()


# ---- cancelling and deadlines ----------------------------------------------------------------------------------------


def test_a_cancelled_job_gives_back_its_room_at_once_and_never_runs() -> None:
    io, ran = ManualIo(queue_jobs_max=1), list[str]()
    future = queue(io, PREFETCH, lambda: ran.append("no"))
    assert io.cancel(future)
    assert not io.cancel(future)
    assert future.cancelled()
    assert wait([future], 0).done, "whoever waits in concurrent.futures hears of it"
    queue(io, PREFETCH)
    assert (io.run(), ran) == (1, [])
    assert io.figures()[PREFETCH].cancelled == 1


def test_a_job_under_way_cannot_be_cancelled() -> None:
    io, answers = ManualIo(), list[bool]()
    future = queue(io, DEMAND, lambda: answers.append(io.cancel(future)))
    io.run()
    assert answers == [False]
    assert future.done()
    assert not future.cancelled()


def test_a_retracted_job_is_out_of_the_queue_before_any_callback_runs() -> None:
    io, heard = ManualIo(queue_jobs_max=1), list[bool]()
    future = queue(io, SPILL)
    future.add_done_callback(lambda future: heard.append(future.cancelled()))
    assert io.retract(future)
    assert (heard, io.run()) == ([], 0)
    assert future.cancel()
    assert heard == [True]
    assert not io.retract(future)


def test_a_future_cancelled_behind_our_back_is_counted_when_its_turn_comes() -> None:
    io = ManualIo()
    future = queue(io, DEMAND)
    assert future.cancel()
    io.run()
    assert (io.figures()[DEMAND].cancelled, io.figures()[DEMAND].done) == (1, 0)
    io.check_integrity()


def test_a_job_not_begun_by_its_deadline_is_dropped_and_its_future_says_so() -> None:
    io, ran = ManualIo(), list[str]()
    late = io.submit(PREFETCH, 1, lambda: ran.append("late"), deadline_s=io.clock.now_s + 1)
    in_time = io.submit(PREFETCH, 1, lambda: ran.append("in time"), deadline_s=io.clock.now_s + 3)
    assert late is not None
    assert in_time is not None
    io.clock.now_s += 1
    io.run()
    assert ran == ["in time"]
    assert isinstance(late.exception(0), JobOverdue)
    assert io.figures()[PREFETCH].dropped == 1


def test_those_who_wait_for_an_overdue_job_are_told_before_its_turn_comes() -> None:
    io, told = ManualIo(), list[int]()
    for number in range(10):
        future = io.submit(Priority(number % 3), 1, nothing, deadline_s=io.clock.now_s + number)
        assert future is not None
        future.add_done_callback(lambda _, number=number: told.append(number))  # type: ignore[misc]
    queue(io, SPILL)
    assert [io.drop_overdue(), io.drop_overdue()] == [1, 0]
    io.clock.now_s += 4
    assert io.drop_overdue() == 4
    assert sorted(told) == [0, 1, 2, 3, 4]
    io.check_integrity()
    assert io.run() == 6


def test_overdue_jobs_make_room_when_the_queue_is_full() -> None:
    io = ManualIo(queue_jobs_max=2)
    overdue = [io.submit(PREFETCH, 1, nothing, deadline_s=io.clock.now_s + 1) for _ in range(2)]
    assert io.submit(PREFETCH, 1, nothing) is None
    io.clock.now_s += 1
    queue(io, PREFETCH)
    assert all(future is not None and isinstance(future.exception(0), JobOverdue) for future in overdue)
    assert io.figures()[PREFETCH].refused == 1


def test_who_joins_a_job_lifts_the_deadline_that_the_first_one_gave_it() -> None:
    io = ManualIo()
    future = io.submit(PREFETCH, 1, lambda: 7, deadline_s=io.clock.now_s + 1)
    assert future is not None
    assert io.hasten(future, PREFETCH)
    io.clock.now_s += 5
    assert io.drop_overdue() == 0
    io.run()
    assert future.result(0) == 7


# ---- life ------------------------------------------------------------------------------------------------------------


def test_jobs_wait_for_the_start() -> None:
    io = IoThreads(2, 10, 10)
    future = queue(io, DEMAND, lambda: 7)
    assert not io.drain(0.0)
    io.start()
    assert future.result(LONG_S) == 7
    assert io.close(LONG_S)


def test_closing_cancels_what_waits_and_lets_what_runs_come_to_its_end() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> int:
        begun.set()
        assert go_on.wait(LONG_S)
        return 7

    io = IoThreads(1, 10, 10)
    io.start()
    running = queue(io, DEMAND, hold)
    assert begun.wait(LONG_S)
    assert not io.drain(0.0), "nothing is queued, but something is under way"
    waiting = [queue(io, priority) for priority in Priority]
    assert not io.close(0.0), "the job under way is not over"
    assert all(future.cancelled() for future in waiting)
    assert io.submit(DEMAND, 1, nothing) is None
    go_on.set()
    assert io.close(LONG_S)
    assert running.result(0) == 7
    io.check_integrity()


def test_a_job_may_close_the_threads_and_does_not_wait_for_its_own() -> None:
    io = IoThreads(2, 10, 10)
    io.start()
    assert queue(io, DEMAND, lambda: io.close(LONG_S)).result(LONG_S) is False
    assert io.close(LONG_S)
    assert io.close(LONG_S), "once more does nothing"


def test_drain_waits_for_the_callbacks_and_for_what_they_queue() -> None:
    ran = list[str]()
    with threads(2) as io:
        io.pause()

        def again(future: Future[object]) -> None:
            queue(io, SPILL, lambda: ran.append("second"))

        queue(io, DEMAND, lambda: ran.append("first")).add_done_callback(again)
        io.resume()
        assert io.drain(LONG_S)
        assert ran == ["first", "second"]
