"""Who has which row of a GPU's running checksums (device.py, Summing), and until when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvredis.adapters.transfer.base import NO_ROW

from .device import Event, Summing


class RingSum:
    """Sum (transfer/base.py): one row of the device's, until its checksum is known or nobody wants it."""

    __slots__ = ("_digest", "_nbytes", "_sums", "event", "row")

    def __init__(self, sums: RingSums, row: int, nbytes: int) -> None:
        self.row = row
        self.event: Event | None = None
        """Behind what was enqueued for it last."""
        self._sums: RingSums | None = sums
        self._nbytes = nbytes
        self._digest = ""

    def done(self) -> bool:
        """As Sum.done."""
        return self._sums is None or (self.event is not None and self.event.query())

    def result(self) -> str:
        """As Sum.result."""
        sums = self._sums
        if sums is not None:
            if self.event is None:
                raise RuntimeError("no byte of this chunk has passed the GPU")
            sums.wait(self.event)
            self._digest = sums.summing.digest(self.row, self._nbytes)
            self._end()
        return self._digest

    def cancel(self) -> bool:
        """As Sum.cancel; waits until the device does no more for it."""
        if self._sums is not None:
            if self.event is not None:
                with suppress(RuntimeError):  # the device is lost, and nothing runs on it any more
                    self.event.synchronize()
            self._end()
        return True

    def _end(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.give_back(self.row)


class RingSums:
    """The rows of a device's running checksums, and who has which. Any thread."""

    def __init__(self, summing: Summing, rows: int) -> None:
        self.summing = summing
        self._passed: Event | None = None
        self._free = deque(range(rows))
        self._taken: dict[int, RingSum] = {}

    def take(self, nbytes: int) -> RingSum | None:
        """Give a row; None while all are taken."""
        try:
            row = self._free.popleft()
        except IndexError:
            return None
        taken = self._taken[row] = RingSum(self, row, nbytes)
        return taken

    def found(self, rows: Sequence[int], event: Event) -> None:
        """Behind `event` these rows hold what was enqueued until now. Raises RuntimeError for a row that `sum_up` has
        not given out."""
        for row in rows:
            if row == NO_ROW:
                continue
            taken = self._taken.get(row)
            if taken is None:
                raise RuntimeError(f"row {row} of the checksums is not in use: sum_up comes first")
            taken.event = event

    def wait(self, event: Event) -> None:
        """Wait until that has been passed; the device is asked once where many rows end behind the same. Raises
        RuntimeError when it failed."""
        if event is not self._passed:
            event.synchronize()
            self._passed = event

    def give_back(self, row: int) -> None:
        """Nothing is enqueued for it any more, and nobody asks."""
        del self._taken[row]
        self._free.append(row)
