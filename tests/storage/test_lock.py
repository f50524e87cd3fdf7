"""The store's lock: one holder at a time, and who waits for it lets the others go on."""

import threading

import pytest

from kvredis.storage._core import Lock

WAIT_S = 30
THREADS, ROUNDS = 8, 3000


def test_of_many_threads_one_holds_it_at_a_time_and_each_gets_it() -> None:
    lock, begin, inside, most = Lock(), threading.Barrier(THREADS), [0], [0]
    taken = dict.fromkeys(range(THREADS), 0)

    def take(number: int) -> None:
        begin.wait(WAIT_S)
        for _ in range(ROUNDS):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                threading.Event().wait(0)  # lets the interpreter go, so that others come to wait
                taken[number] += 1
                inside[0] -= 1

    threads = [threading.Thread(target=take, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert (most[0], set(taken.values())) == (1, {ROUNDS})
    assert not lock.locked()


def test_a_thread_that_waits_for_it_goes_on_when_it_is_given_back_and_no_sooner() -> None:
    lock, waits, has = Lock(), threading.Event(), threading.Event()
    assert lock.acquire()

    def take() -> None:
        waits.set()
        with lock:
            has.set()

    thread = threading.Thread(target=take)
    thread.start()
    assert waits.wait(WAIT_S)
    assert not lock.acquire(blocking=False)
    assert not has.is_set()
    lock.release()
    assert has.wait(WAIT_S)
    thread.join(WAIT_S)
    assert lock.acquire(blocking=False)
    assert lock.locked()


def test_it_is_given_back_where_what_is_done_with_it_fails_and_not_twice() -> None:
    lock = Lock()
    with pytest.raises(KeyError), lock:
        raise KeyError
    assert not lock.locked()
    with pytest.raises(RuntimeError, match="unlocked"):
        lock.release()
