"""The disk's threads under random use: in turn against a naive model, and from many threads at once.

The model says which job is next; the threads, that each admitted job ends exactly once, and that whatever was neither
cancelled nor dropped has run exactly once; those who ask for transfers, that each of them is answered once and that no
block moves twice at the same time.
"""

import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest

from kvredis.storage.background import IoFigures, IoThreads, JobOverdue, Priority
from kvredis.storage.tiering.transfers import Kind, State, Transfer, Transfers

from .tiering.fake_io import ManualIo

LONG_S = 60.0
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
        for entry in list(model):  # whoever was dropped while others were submitted or run
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
def test_among_many_threads_everybody_is_answered_once_and_no_block_moves_twice_at_a_time(seed: int) -> None:
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
