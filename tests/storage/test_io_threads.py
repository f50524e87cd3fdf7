"""The disk's threads: who is begun first, what is refused, and that no job runs twice or is lost."""

import ctypes
import gc
import logging
import random
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager

import pytest

from kvredis.storage.background import IoFigures, IoThreads, JobOverdue, Priority, start_thread, start_worker
from kvredis.storage.tiering.transfers import Kind, State, Transfer, Transfers

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


def test_figures_are_right_for_a_thread_that_a_result_has_woken() -> None:
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
    assert wait([future], 0).done, "a thread that waits in concurrent.futures hears of it"
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


def test_those_that_wait_for_an_overdue_job_are_told_before_its_turn_comes() -> None:
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


def test_a_caller_that_joins_a_job_lifts_the_deadline_that_the_first_one_gave_it() -> None:
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


# The disk's threads under random use: in turn against a naive model, and from many threads at once. The model says
# which job is next; the threads, that each admitted job ends exactly once, and that whatever was neither cancelled
# nor dropped has run exactly once; those who ask for transfers, that each of them is answered once and that no
# block moves twice at the same time.

CLIENTS = 4


STEPS = 2000


@pytest.mark.parametrize("seed", range(8))
def test_the_next_job_is_always_the_one_that_a_naive_model_names(seed: int) -> None:
    rng = random.Random(seed)
    io, ran, dropped = ManualIo(queue_jobs_max=6, queue_bytes_max=50), list[int](), list[int]()
    model: list[tuple[Priority, int, int, float | None]] = []  # priority, turn, number, deadline
    futures: dict[int, Future[None]] = {}
    for step in range(3000):
        choice = rng.random()
        if choice < 0.5:
            priority, nbytes = Priority(rng.randrange(3)), rng.randrange(1, 30)
            deadline_s = io.clock.now_s + rng.randrange(20) if rng.random() < 0.3 else None
            future = io.submit(priority, nbytes, lambda step=step: ran.append(step), deadline_s=deadline_s)  # type: ignore[misc]
            if future is not None:
                futures[step] = future
                model.append((priority, step, step, deadline_s))
        elif choice < 0.6 and model:
            at, priority = rng.randrange(len(model)), Priority(rng.randrange(3))
            was, turn, number, _ = model[at]
            assert io.hasten(futures[number], priority)
            model[at] = (priority, step, number, None) if priority < was else (was, turn, number, None)
        elif choice < 0.65 and model:
            assert io.cancel(futures[model.pop(rng.randrange(len(model)))[2]])
        elif choice < 0.7:
            io.clock.now_s += rng.randrange(4)
            io.drop_overdue()
        else:
            io.run_next()
        for entry in list(model):  # those that were dropped while others were submitted or run
            future = futures[entry[2]]
            if future.done() and future.exception(0) is not None:
                assert entry[3] is not None
                assert entry[3] <= io.clock.now_s
                dropped.append(entry[2])
                model.remove(entry)
        if ran:
            expected = min(model, key=lambda entry: (entry[0], entry[1]))
            assert ran == [expected[2]]
            assert expected[3] is None or expected[3] > io.clock.now_s
            model.remove(expected)
            ran.clear()
        io.check_integrity()
    figures = io.figures().values()
    assert sum(each.dropped for each in figures) == len(dropped) > 0
    assert min(min(each.done, each.refused, each.cancelled) for each in figures) > 0
    assert sum(each.queued for each in figures) == len(model)


@pytest.fixture
def _restless_interpreter() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before_s)


def over(figures: IoFigures) -> int:
    return figures.done + figures.failed + figures.cancelled + figures.dropped


def is_overdue(future: Future[object]) -> bool:
    return isinstance(future.exception(0), JobOverdue)


class Crowd:
    """Clients that do whatever comes to their minds with one IoThreads, and what they saw."""

    def __init__(self, io: IoThreads) -> None:
        self.io = io
        self.futures: dict[tuple[int, int], Future[object]] = {}
        self.ran: list[tuple[int, int]] = []  # appending to a list is one step of the interpreter
        self.ended: list[tuple[int, int]] = []
        self.wrong: list[BaseException] = []

    def submit(self, name: tuple[int, int], rng: random.Random) -> Future[object] | None:
        """One job, which may fail and may have a deadline."""
        fails = rng.random() < 0.1

        def job() -> object:
            self.ran.append(name)
            if fails:
                raise OSError("EIO")
            return name

        deadline_s = self.io._clock_s() + rng.random() / 1000 if rng.random() < 0.2 else None
        future = self.io.submit(Priority(rng.randrange(3)), rng.randrange(1, 300), job, deadline_s=deadline_s)
        if future is not None:
            self.futures[name] = future
            future.add_done_callback(lambda _: self.ended.append(name))
        return future

    def client(self, seed: int, number: int) -> None:
        """What one thread does."""
        rng, mine, io = random.Random(seed * 100 + number), list[Future[object]](), self.io
        try:
            for step in range(STEPS):
                choice = rng.random()
                if choice < 0.6 or not mine:
                    future = self.submit((number, step), rng)
                    mine += [] if future is None else [future]
                elif choice < 0.75:
                    io.hasten(rng.choice(mine), Priority(rng.randrange(3)))
                elif choice < 0.85:
                    io.cancel(rng.choice(mine))
                elif choice < 0.88:
                    rng.choice(mine).cancel()
                elif choice < 0.92:
                    io.drop_overdue()
                elif choice < 0.94:
                    io.pause()
                elif choice < 0.97:
                    io.resume()
                else:
                    io.check_integrity()
        except BaseException as error:
            self.wrong.append(error)


@pytest.mark.usefixtures("_restless_interpreter")
@pytest.mark.parametrize("seed", range(3))
def test_among_many_threads_no_job_runs_twice_and_none_is_lost(seed: int) -> None:
    io = IoThreads(3, 20, 2000)
    io.start()
    crowd = Crowd(io)
    clients = [threading.Thread(target=crowd.client, args=(seed, number)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    io.resume()
    assert io.drain(LONG_S)
    assert io.close(LONG_S)
    io.check_integrity()
    futures, figures = crowd.futures, list(io.figures().values())
    assert crowd.wrong == []
    assert all(future.done() for future in futures.values())
    assert Counter(crowd.ended) == Counter(futures.keys()), "each future was completed once"
    begun = {name: future for name, future in futures.items() if not (future.cancelled() or is_overdue(future))}
    assert sorted(crowd.ran) == sorted(begun)
    assert all(future.exception(0) is not None or future.result(0) == name for name, future in begun.items())
    assert sum(map(over, figures)) == len(futures)
    assert sum(each.done + each.failed for each in figures) == len(begun)
    assert all(each.queued == each.queued_bytes == each.running == 0 for each in figures)
    assert min(min(each.done, each.failed, each.cancelled, each.refused) for each in figures) > 0
    assert sum(each.hastened for each in figures) > 0


class Askers:
    """Clients that ask for the same few blocks; each request either hears of its end once or was taken back."""

    def __init__(self, io: IoThreads) -> None:
        self.io = io
        self.transfers: Transfers[bytes] = Transfers(io)
        self.moving: Counter[bytes] = Counter()
        self.asked: list[tuple[int, int]] = []
        self.answered: list[tuple[int, int]] = []
        self.wrong: list[object] = []

    def start(self, kind: Kind, key: bytes) -> Callable[[], Future[bytes] | None]:
        """A job that notes when another of its key runs at the same time."""

        def job() -> bytes:
            self.moving[key] += 1  # only one thread at a time writes here, or else that is what is wrong
            if self.moving[key] != 1:
                self.wrong.append(key)
            self.moving[key] -= 1
            return key

        return lambda: self.io.submit(kind.priority, 10, job)

    def client(self, seed: int, number: int) -> None:
        """What one thread does."""
        rng = random.Random(seed * 100 + number)
        try:
            for step in range(STEPS):
                name, key, kind = (number, step), b"%d" % rng.randrange(5), rng.choice(list(Kind))

                def done(transfer: Transfer[bytes], name: tuple[int, int] = name, key: bytes = key) -> None:
                    self.answered.append(name)
                    if transfer.key != key or (transfer.state is State.DONE and transfer.result != key):
                        self.wrong.append(transfer)

                self.asked.append(name)
                transfer = self.transfers.join_or_start(kind, key, 0, self.start(kind, key), done)
                if rng.random() < 0.6 and transfer.withdraw(done):
                    self.answered.append(name)
                self.transfers.check_integrity()
        except BaseException as error:
            self.wrong.append(error)


@pytest.mark.usefixtures("_restless_interpreter")
@pytest.mark.parametrize("seed", range(3))
def test_among_many_threads_each_is_answered_once_and_no_block_moves_twice_at_a_time(seed: int) -> None:
    io = IoThreads(3, 3, 1000)
    io.start()
    askers = Askers(io)
    clients = [threading.Thread(target=askers.client, args=(seed, number)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert io.drain(LONG_S)
    assert io.close(LONG_S)
    assert askers.wrong == []
    assert sorted(askers.answered) == sorted(askers.asked)
    assert len(askers.transfers) == 0
    figures: Counter[str] = Counter()
    for each in askers.transfers.figures().values():
        figures.update(each)
    assert min(figures[name] for name in ("joined", "done", "cancelled")) > 0
    assert figures["started"] == sum(figures[name] for name in ("done", "cancelled", "refused", "failed", "overdue"))


# Threads in the background: what their work raises is in the log, and a worker goes on with the next turn.


class Worker:
    """Takes words, one a turn, and raises those that are exceptions; None ends it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.words: list[str | type[BaseException] | None] = []
        self.done: list[str] = []
        self.is_waiting = threading.Event()
        self.thread = start_worker(self.turn, "worker")

    def turn(self) -> bool:
        with self.changed:
            self.is_waiting.set()
            self.changed.wait_for(lambda: self.words)
            word = self.words.pop(0)
        if isinstance(word, type):
            raise word
        if word is not None:
            self.done.append(word)
        return word is not None

    def tell(self, *words: str | type[BaseException] | None) -> None:
        """Give it words."""
        with self.changed:
            self.words += words
            self.changed.notify_all()

    def end(self) -> list[str]:
        """End it, and say what it has done."""
        self.tell(None)
        self.thread.join(LONG_S)
        assert not self.thread.is_alive()
        return self.done


@pytest.mark.parametrize("error", [ValueError, MemoryError, SystemExit, KeyboardInterrupt])
def test_a_worker_goes_on_after_a_turn_that_raises_and_says_so(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker()
    worker.tell("one", error, "two")
    assert worker.end() == ["one", "two"]
    assert caplog.messages == ["the thread 'worker' failed in its work and goes on"]


def test_a_worker_that_is_interrupted_while_it_waits_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    assert worker.is_waiting.wait(LONG_S)
    number = ctypes.c_ulong(worker.thread.ident or 0)
    worker.changed.acquire()  # which it lets go of when it waits
    worker.tell("one")
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt)) == 1
    # Python 3.11 enters no function that is traced, as for coverage, before the thread has heard of its exception.
    worker.changed.release()
    assert worker.end() == ["one"]
    assert caplog.messages == ["the thread 'worker' failed in its work and goes on"]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_thread_that_ends_by_an_exception_says_so(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    def run() -> None:
        raise error

    start_thread(run, "once").join(LONG_S)
    assert caplog.messages == ["the thread 'once' failed in its work and ends"]
