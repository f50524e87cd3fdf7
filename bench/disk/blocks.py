"""The blocks that the rates are measured with: images ready for the disk, places for what comes back, and the proof.

An image is what the disk tier writes: page-aligned, the payload HEADER_BYTES behind its start. No two blocks are alike,
and which image a block holds shifts by one with every pass, so that a record of another key or of an earlier pass is
noticed. Images and places are as many as blocks: each comes from memory of its own, as in a server.

That memory is an arena, on hugepages if the machine has some to give, because its pages decide how fast a device can
be: 2 MiB in one piece are one request, 512 scattered pages are several, which has been seen to cost half the rate.
"""

from __future__ import annotations

import ctypes
import random
from typing import Final

from kvredis.bench.core.errors import VerificationError
from kvredis.storage.disk.segment import HEADER_BYTES, record_bytes
from kvredis.storage.memory.arena import PREFAULT_THREADS_MAX, Arena

_FILL_BYTES: Final = 1 << 20

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcmp.restype = ctypes.c_int


def same_bytes(ours: int, theirs: int, nbytes: int) -> bool:
    """Compare two stretches of memory, by address."""
    return not _libc.memcmp(ours, theirs, nbytes)


class Blocks:
    """`count` blocks with a payload of `size_bytes` each. Owns twice their memory until `close`.

    Raises ArenaError when there is not so much.
    """

    def __init__(self, size_bytes: int, count: int, seed: int) -> None:
        self.size_bytes, self.count = size_bytes, count
        self.stride_bytes = record_bytes(size_bytes)
        self._places_at = count * self.stride_bytes
        self._arena = Arena.create(2 * self._places_at)
        self._arena.prefault(PREFAULT_THREADS_MAX)
        source = random.Random(seed)
        for start in range(0, self._places_at, _FILL_BYTES):
            end = min(start + _FILL_BYTES, self._places_at)
            self._arena.view[start:end] = source.randbytes(end - start)

    @property
    def pages(self) -> str:
        """What kind of pages the memory is made of."""
        return self._arena.pages

    @property
    def nbytes(self) -> int:
        """The payload of all blocks."""
        return self.size_bytes * self.count

    def image(self, index: int, shift: int) -> memoryview:
        """Lend the image of block `index` in pass `shift`; whoever writes it may use its first HEADER_BYTES."""
        at = (index + shift) % self.count * self.stride_bytes
        return self._arena.view[at : at + self.stride_bytes]

    def place(self, index: int) -> memoryview:
        """Lend the memory that block `index` is read into."""
        at = self._places_at + index * self.stride_bytes
        return self._arena.view[at : at + self.stride_bytes]

    def wipe(self) -> None:
        """Forget what was read, so that a later comparison cannot pass on it."""
        ctypes.memset(self._arena.address + self._places_at, 0, self._places_at)

    def verify(self, shift: int, who: str, nbytes: int) -> int:
        """Compare `nbytes` behind each image's header with what was read; give the bytes compared.

        Raises VerificationError at the first block that is not what was written in pass `shift`.
        """
        for index in range(self.count):
            ours = (index + shift) % self.count * self.stride_bytes + HEADER_BYTES
            theirs = self._places_at + index * self.stride_bytes + HEADER_BYTES
            if not same_bytes(self._arena.address + ours, self._arena.address + theirs, nbytes):
                raise VerificationError(f"{who} returned a wrong byte in block {index}")
        return self.count * nbytes

    def close(self) -> None:
        """Give the memory back; nothing that was lent may be used afterwards."""
        self._arena.close()
