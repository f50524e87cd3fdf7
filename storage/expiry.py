"""When keys and holds end: the clock that keys end by, and the deadlines of keys and of leases with a time limit.

The clock tells Unix milliseconds, which stand still while a transaction runs, as Redis' do. Without that a key may be
there for the first commands of an EXEC, and gone for the rest.
"""

import heapq
import time
from collections import OrderedDict
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

    A deadline that has become void (`holds(at, item)` is false) stays until it falls due or is swept: a key that gets a
    new expiry with every write would otherwise leave one behind each time. They lie in heaps by time, one for each span
    of `width`, so that a sweep can go on where the last one ended: all at once would take seconds for a million.
    """

    __slots__ = ("_count", "_heaps", "_holds", "_spans", "_ticket", "_width")

    def __init__(self, holds: Callable[[float, T], bool], width: float = 1.0) -> None:
        self._holds = holds
        self._width = width
        self._heaps: OrderedDict[int, list[tuple[float, int, T]]] = OrderedDict()  # the one swept last at the end
        self._spans: list[int] = []  # of the same heaps, themselves in one
        self._count = 0
        self._ticket = 0  # it keeps a heap from comparing items

    def add(self, at: float, item: T, alive: int) -> None:
        """Remember `item` for the time `at`, on whatever clock the caller uses throughout.

        `alive` is a bound on the deadlines that hold; len() never exceeds 2 * alive + STALE_MAX after an addition. A
        sweep costs a step a deadline and drops about half, so an addition costs O(log n) on average.
        """
        self._ticket += 1
        span = int(at // self._width)
        heap = self._heaps.get(span)
        if heap is None:
            heap = self._heaps[span] = []
            heapq.heappush(self._spans, span)
        heapq.heappush(heap, (at, self._ticket, item))
        self._count += 1
        while self._count > 2 * alive + STALE_MAX:
            self._sweep()

    def _sweep(self) -> None:
        """Drop what is void, or named twice, in the heap that was swept longest ago."""
        span, heap = next(iter(self._heaps.items()))
        self._heaps.move_to_end(span)
        left = {(at, item): ticket for at, ticket, item in heap if self._holds(at, item)}
        self._count += len(left) - len(heap)
        heap[:] = [(at, ticket, item) for (at, item), ticket in left.items()]
        heapq.heapify(heap)

    def due(self, now: float) -> Iterator[T]:
        """Take out what has fallen due by `now` and still holds, one by one; what is not consumed stays."""
        while self._spans:
            heap = self._heaps[self._spans[0]]
            if not heap:
                del self._heaps[heapq.heappop(self._spans)]
                continue
            if heap[0][0] > now:
                return
            at, _, item = heapq.heappop(heap)
            self._count -= 1
            if self._holds(at, item):
                yield item

    def drop(self, count: int) -> bool:
        """Forget about so many of them, or somewhat more; False when none is left. Nothing else may follow."""
        while self._heaps and count > 0:
            _, heap = self._heaps.popitem()
            if len(heap) > count:
                del heap[-count:]
                self._heaps[-1] = heap
            count -= max(1, len(heap))
        return bool(self._heaps)

    def __len__(self) -> int:
        return self._count
