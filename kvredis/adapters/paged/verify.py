"""An engine believes whatever bytes it is given, so the checksum is where a damaged block becomes a miss.

On a GPU the transfer finds checksums where the bytes pass (transfer/base.py, Sum). Else hashing runs beside the copies,
in threads of its own: one core does 10 to 30 GB/s, PCIe more.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor

from kvredis.adapters.engine.block import Block, checksum_of
from kvredis.adapters.transfer.base import NO_ROW, Sum, Transfer

THREADS_MAX = 8


class Checking:
    """Checksums of tensors that lie still in host memory. With `is_on` false nothing is hashed, and all is well."""

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = max(1, min(THREADS_MAX, cores // 2))
        self._pool = ThreadPoolExecutor(threads, "kvredis checksums") if is_on else None  # threads begin when needed

    def verdict(self, block: Block) -> "Verdict":
        """On whether a block is what its header claims, to be begun when it suits."""
        return Verdict(self._pool if block.checksum else None, block)

    def sum_of(self, tensor: memoryview) -> "Future[str] | None":
        """The checksum for a header, to come; None when it is off."""
        return None if self._pool is None else self._pool.submit(checksum_of, tensor)

    def passing(self, transfer: Transfer, tensor: memoryview) -> Sum | None:
        """The same of a tensor that `transfer` moves next, where it can be found in passing."""
        return None if self._pool is None else transfer.sum_of(tensor.nbytes)

    def close(self) -> None:
        """Let go of the threads; nothing may be under way."""
        if self._pool is not None:
            self._pool.shutdown()


class Verdict:
    """On one block. Once begun, the bytes are looked at until `wait` or `drop`."""

    __slots__ = ("_block", "_pool", "_sum")

    def __init__(self, pool: ThreadPoolExecutor | None, block: Block) -> None:
        self._pool = pool
        self._block = block
        self._sum: Future[str] | Sum | None = None

    def row_in(self, transfer: Transfer, tensor: memoryview) -> int:
        """Where `transfer` adds up the checksum of `tensor`, which it is given next, if it does; begun then. NO_ROW
        where it does not, or where `tensor` is not all of the block's."""
        if self._pool is None or self._sum is not None or tensor.nbytes != self._block.tensor.nbytes:
            return NO_ROW
        passing = self._sum = transfer.sum_of(tensor.nbytes)
        return NO_ROW if passing is None else passing.row

    def begin(self) -> None:
        """Hash the bytes in a thread of the pool."""
        if self._pool is not None and self._sum is None:
            self._sum = self._pool.submit(checksum_of, self._block.tensor)

    @property
    def is_known(self) -> bool:
        """Whether `wait` answers at once."""
        return self._pool is None or (self._sum is not None and self._sum.done())

    def wait(self) -> bool:
        """Whether the bytes are the ones that were stored."""
        self.begin()
        return self._sum is None or self._sum.result() == self._block.checksum

    def drop(self) -> None:
        """Want no answer."""
        if self._sum is not None and not self._sum.cancel():
            self._sum.result()
        self._pool, self._block = None, Block(memoryview(b""), 0)
