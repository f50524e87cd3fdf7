"""Checksums of chunks that move. An engine believes whatever bytes it is given, so the checksum is where a damaged
block becomes a miss.

On a GPU the transfer finds a checksum where the bytes pass (base.py, Sum). Else threads of our own hash the chunk's
tensor in host memory, beside the copies: one core does 10 to 30 GB/s, PCIe more. Stores and loads ask a Checksum, and
need not know which of the two answers.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor

from kvredis.adapters.engine.block import checksum_of

from .base import NO_ROW, Sum, Transfer

THREADS_MAX = 8


class Checksums:
    """Makes the checksums of one mover's chunks. With `is_on` false nothing is hashed, and all of them are ""."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, min(THREADS_MAX, cores // 2))
        self._pool = ThreadPoolExecutor(threads, "kvredis checksums") if is_on else None  # threads begin when needed

    def of(self, tensor: memoryview, *, is_wanted: bool = True) -> "Checksum":
        """The checksum of a chunk's tensor, to be begun when it suits."""
        return Checksum(self._pool if is_wanted else None, tensor)

    def close(self) -> None:
        """Let go of the threads; nothing may be under way."""
        if self._pool is not None:
            self._pool.shutdown()


class Checksum:
    """The checksum of one chunk's tensor in host memory. Once begun, the bytes are looked at until `result` or
    `drop`."""

    __slots__ = ("_pool", "_row", "_sum", "_tensor")

    def __init__(self, pool: ThreadPoolExecutor | None, tensor: memoryview) -> None:
        self._pool = pool
        self._tensor = tensor
        self._row: int | None = None  # not decided yet
        self._sum: Future[str] | Sum | None = None

    def row_in(self, transfer: Transfer, memory: memoryview) -> int:
        """Where `transfer`, which is given `memory` next, adds the checksum up; NO_ROW where it does not, or where that
        is not all of the tensor. The first answer is the last: of a tensor that is on its way a sum would lack what has
        passed."""
        if self._row is None:
            self._row = NO_ROW
            if self._pool is not None and memory.nbytes == self._tensor.nbytes:
                passing = self._sum = transfer.sum_of(memory.nbytes)
                self._row = NO_ROW if passing is None else passing.row
        return self._row

    def is_found_by(self, transfer: Transfer, memory: memoryview) -> bool:
        """Whether `transfer`, which is given `memory` next, finds the checksum, or none is wanted: no processor looks
        at the bytes then."""
        return self._pool is None or self.row_in(transfer, memory) != NO_ROW

    @property
    def is_passing(self) -> bool:
        """Whether the transfer that was given the tensor finds it."""
        return self._row not in (None, NO_ROW)

    def begin(self) -> None:
        """Have a thread hash the bytes, which are all there, unless the transfer finds the checksum. Raises
        RuntimeError when there is no thread left."""
        if self._pool is not None and self._sum is None:
            self._sum = self._pool.submit(checksum_of, self._tensor)

    @property
    def is_known(self) -> bool:
        """Whether `result` waits for nothing."""
        return self._pool is None or (self._sum is not None and self._sum.done())

    def result(self) -> str:
        """Wait for it; "" where none is wanted. Raises RuntimeError when the device failed."""
        self.begin()
        return "" if self._sum is None else self._sum.result()

    def drop(self) -> None:
        """Want it no more, and wait until the bytes are not looked at."""
        if self._sum is not None and not self._sum.cancel():
            self._sum.result()
        self._pool, self._tensor = None, memoryview(b"")
