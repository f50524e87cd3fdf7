"""Calls that nothing else bounds: the system's resolver, and clients that use it.

WHY a thread: the C library's resolver waits for its own timeouts, often half a minute, and nothing ends it. An engine
goes on without the answer; the thread ends whenever the resolver does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, NoReturn, TypeVar

T = TypeVar("T")

CALLS_MAX: Final = 16
"""Calls that may be on their way in a process, those that hang among them."""
_calls = threading.BoundedSemaphore(CALLS_MAX)


def within(timeout_s: float, doing: str, work: Callable[[], T]) -> T:
    """Give what `work` returns, or raise what it raises; TimeoutError, which says `doing`, when it takes too long.

    `work` runs in a thread of its own, and goes on after the timeout: nobody is told of its result then. Raises
    RuntimeError when no thread can be had, and for what was to end that thread alone: SystemExit.
    """
    results: SimpleQueue[Callable[[], T]] = SimpleQueue()

    def run() -> None:
        try:
            result = work()
            results.put(lambda: result)
        except BaseException as error:
            its_own = error if isinstance(error, Exception) else RuntimeError(f"{doing} was ended by {error!r}")
            results.put(partial(_throw, its_own))
        finally:
            _calls.release()

    if not _calls.acquire(timeout=timeout_s):
        raise TimeoutError(f"timed out {doing}, behind {CALLS_MAX} other calls")
    try:
        threading.Thread(target=run, name=f"kvredis is {doing}", daemon=True).start()
    except BaseException:
        _calls.release()
        raise
    try:
        outcome = results.get(timeout=timeout_s)
    except Empty:
        raise TimeoutError(f"timed out {doing}") from None
    return outcome()


def _throw(error: Exception) -> NoReturn:
    raise error
