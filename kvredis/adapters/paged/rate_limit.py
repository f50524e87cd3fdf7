"""A bound on the bandwidth that the cache takes of a link it shares, and turns: loads, which an engine waits for, go
before stores.

Each piece books its time on an imagined link of that speed, and is moved when its time has passed: so a bound of 1 GB/s
gives 1 GB/s from the first piece on. What the moving itself takes overlaps with the next piece's time. Stores wait for
loads, but not for ever: the engine's pages are theirs until they end.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LATE_S = 0.025
"""Time that may be made up for when a piece is booked late, since its predecessor took so long to move; its own time if
that is more."""

PATIENCE_S = 0.25
PATIENCE_TIMES = 25
"""How long a piece of a store stands back for loads: so many times as long as it takes itself, or PATIENCE_S if that is
more. Beside loads that never end stores have a 26th of the bandwidth at most."""


def _wait(changed: threading.Condition, seconds: float) -> None:
    changed.wait(seconds)


class Bandwidth:
    """`bytes_per_s` for loads and stores together; None: no bound, and no order. Raises ValueError below one."""

    def __init__(
        self,
        bytes_per_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], None] = _wait,
    ) -> None:
        if bytes_per_s is not None and bytes_per_s < 1:
            raise ValueError(f"a bandwidth of {bytes_per_s} bytes/s moves nothing")
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._wait = wait
        self._changed = threading.Condition()
        self._free_s = clock()  # when all that is booked has passed
        self._loads = 0

    @property
    def is_bound(self) -> bool:
        """Whether anything ever waits."""
        return self._bytes_per_s is not None

    def piece_bytes(self, wanted: int) -> int:
        """How much to take at once: a bound is kept evenly when pieces are of 10 ms at most."""
        return wanted if self._bytes_per_s is None else min(wanted, int(self._bytes_per_s / 100) + 1)

    @contextmanager
    def row(self, *, is_load: bool) -> Iterator[None]:
        """A row of pieces: the pause before it is not made up for. Stores stand back for a row of loads from end to
        end: one that went between two of its pieces would take its time from them."""
        with self._changed:
            self._free_s = max(self._free_s, self._clock())
            self._loads += is_load
        try:
            yield
        finally:
            with self._changed:
                self._loads -= is_load
                self._changed.notify_all()

    def take(self, nbytes: int, *, is_load: bool) -> None:
        """Block until so many bytes may be moved. Stores stand back for as long as a load, or a row of them, waits, if
        their patience lasts."""
        if self._bytes_per_s is None:
            return
        with self._changed:
            self._loads += is_load
            try:
                patient_s = self._clock() + max(PATIENCE_S, PATIENCE_TIMES * nbytes / self._bytes_per_s)
                while not is_load and self._loads and (left_s := patient_s - self._clock()) > 0:
                    self._wait(self._changed, left_s)
                self._free_s = until_s = self._booked_s(nbytes)
                while (left_s := until_s - self._clock()) > 0:
                    self._wait(self._changed, left_s)
            finally:
                self._loads -= is_load
                self._changed.notify_all()

    def _booked_s(self, nbytes: int) -> float:
        """When what is booked now has passed; there is a bound."""
        assert self._bytes_per_s is not None
        mine_s = nbytes / self._bytes_per_s
        return max(self._free_s, self._clock() - max(LATE_S, mine_s)) + mine_s
