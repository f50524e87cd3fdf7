"""The time that keys end by: Unix milliseconds, which stand still while a transaction runs, as Redis' do.

Without that a key may be there for the first commands of an EXEC, and gone for the rest.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def unix_ms() -> int:
    """Wall-clock time as Redis counts expiry: milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Clock:
    """Calling it tells the time. One thread at a time has a moment; what others ask meanwhile is told the same."""

    __slots__ = ("_clock_ms", "_moment_ms")

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._moment_ms = 0

    def __call__(self) -> int:
        return self._moment_ms or self._clock_ms()

    @contextmanager
    def one_moment(self) -> Iterator[None]:
        """Within it no time passes; one within another is a part of that."""
        if self._moment_ms:
            yield
            return
        self._moment_ms = self._clock_ms()
        try:
            yield
        finally:
            self._moment_ms = 0
