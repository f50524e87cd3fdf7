"""When keys and holds end: the clock that keys end by, and the deadlines of keys and of leases with a time limit.

The clock tells Unix milliseconds, which stand still while a transaction runs, as Redis' do. Without that a key may be
there for the first commands of an EXEC, and gone for the rest.
"""

import heapq
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar


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


T = TypeVar("T", bound=Hashable)

STALE_MAX: Final = 256
"""Deadlines that no longer hold are swept out once they outnumber those that may by this many."""


class Deadlines(Generic[T]):
    """What is to happen when, earliest first.

    A deadline that has become void (`holds(at, item)` is false) stays in the heap until it falls due or is swept: a key
    that gets a new expiry with every write would otherwise leave one behind each time.
    """

    __slots__ = ("_heap", "_holds", "_ticket")

    def __init__(self, holds: Callable[[float, T], bool]) -> None:
        self._holds = holds
        self._heap: list[tuple[float, int, T]] = []  # the ticket keeps the heap from comparing items
        self._ticket = 0

    def add(self, at: float, item: T, alive: int) -> None:
        """Remember `item` for the time `at`, on whatever clock the caller uses throughout.

        `alive` is a bound on the deadlines that hold; len() never exceeds 2 * alive + STALE_MAX after an addition. A
        sweep costs a step a deadline and drops at least half, so an addition costs O(log n) on average.
        """
        self._ticket += 1
        heapq.heappush(self._heap, (at, self._ticket, item))
        if len(self._heap) > 2 * alive + STALE_MAX:
            left = {(at, item): ticket for at, ticket, item in self._heap if self._holds(at, item)}
            self._heap = [(at, ticket, item) for (at, item), ticket in left.items()]
            heapq.heapify(self._heap)

    def due(self, now: float) -> Iterator[T]:
        """Take out what has fallen due by `now` and still holds, one by one; what is not consumed stays."""
        while self._heap and self._heap[0][0] <= now:
            at, _, item = heapq.heappop(self._heap)
            if self._holds(at, item):
                yield item

    def held(self) -> set[T]:
        """What is still to happen, in no order; for a caller who counts it."""
        return {item for at, _, item in list(self._heap) if self._holds(at, item)}

    def __len__(self) -> int:
        return len(self._heap)
