"""Threads in the background: what their work raises is in the log, and a worker goes on with the next turn."""

import ctypes
import threading

import pytest

from kvredis.storage.background import start_thread, start_worker

LONG_S = 60.0


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
    with worker.changed:  # which it lets go of when it waits
        number = ctypes.c_ulong(worker.thread.ident or 0)
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt)) == 1
    worker.tell("one")
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
